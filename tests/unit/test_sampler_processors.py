"""Masks, bias, penalties and filters against slow references and transformers' own processors."""

import numpy as np
import pytest
import torch
import transformers

from warmroot.actors.runner.constraints import constrain
from warmroot.actors.runner.filters import Filters, largest, thresholds
from warmroot.actors.runner.rows import SamplingRow
from warmroot.actors.runner.sampler import Sampler
from warmroot.cluster.sampling_params import SamplingParams

VOCAB = 300
LOGITS = torch.randn(VOCAB, generator=torch.Generator().manual_seed(11)) * 3
TOKENS = [5, 9, 9, 250, 5, 17, 17, 17, 42]
NUM_PROMPT = 4
EOS = (2, 7)


def row(tokens=TOKENS, num_prompt: int = NUM_PROMPT, **options) -> SamplingRow:
    return SamplingRow(SamplingParams(**options), 1, num_prompt, np.array(tokens, np.int32))


def constrained(**options) -> torch.Tensor:
    logits = LOGITS[None].clone()
    constrain(logits, [row(**options)], EOS)
    return logits[0]


def hugging_face(processor, tokens=TOKENS) -> torch.Tensor:
    return processor(torch.tensor([tokens]), LOGITS[None].clone())[0]


@pytest.mark.parametrize("penalty", [0.7, 1.3])
def test_repetition_penalty_on_prompt_and_output(penalty):
    expected = hugging_face(transformers.RepetitionPenaltyLogitsProcessor(penalty))
    torch.testing.assert_close(constrained(repetition_penalty=penalty), expected, atol=0, rtol=0)


def test_presence_and_frequency_on_output_only():
    found = constrained(presence_penalty=0.5, frequency_penalty=0.25)
    expected = LOGITS.clone()
    for token, count in {5: 1, 17: 3, 42: 1}.items():
        expected[token] -= 0.5 + 0.25 * count
    torch.testing.assert_close(found, expected)
    assert torch.equal(found[[9, 250]], LOGITS[[9, 250]])


def test_penalties_without_output_change_nothing():
    logits = LOGITS[None].clone()
    constrain(logits, [row(TOKENS[:NUM_PROMPT], presence_penalty=2.0, frequency_penalty=2.0)], EOS)
    assert torch.equal(logits[0], LOGITS)


def test_allowed_tokens():
    found = constrained(allowed_token_ids=(3, 100, 3))
    assert torch.isfinite(found).nonzero().flatten().tolist() == [3, 100]
    assert torch.equal(found[[3, 100]], LOGITS[[3, 100]])


def test_logit_bias():
    found = constrained(logit_bias={4: 100.0, 8: -100.0})
    assert found[4] == LOGITS[4] + 100 and found[8] == LOGITS[8] - 100
    assert torch.equal(found[9:], LOGITS[9:])


def banned(**options) -> list[int]:
    return (constrained(**options) == -torch.inf).nonzero().flatten().tolist()


def test_bad_words_follow_the_output():
    words = ((33,), (17, 42, 60), (42, 61), (9, 62), (250, 5, 17, 17, 17, 42, 63), (17, 64))
    # (250 …) begins in the prompt, and after 42 neither 9 nor 17 is the last token.
    assert banned(bad_words_token_ids=words) == [33, 60, 61]


def test_min_tokens_masks_every_stop_token_until_then():
    assert banned(min_tokens=6, stop_token_ids=(70,)) == [2, 7, 70]
    assert banned(min_tokens=5, stop_token_ids=(70,)) == []


def test_ids_outside_the_vocabulary_are_passed_over():
    found = constrained(
        logit_bias={VOCAB: 5.0, -1: 5.0, 3: 5.0},
        bad_words_token_ids=((VOCAB + 9,), (), (4,)),
        stop_token_ids=(-3, 10**6),
        min_tokens=9,
    )
    expected = LOGITS.clone()
    expected[3] += 5.0
    expected[[2, 4, 7]] = -torch.inf
    assert torch.equal(found, expected)
    for allowed in ((VOCAB, 8), (VOCAB,)):
        rows = [row(allowed_token_ids=allowed), row(temperature=0.0)]
        token_ids = Sampler(EOS).sample(torch.stack([LOGITS, LOGITS]), rows).token_ids
        assert token_ids == [8 if 8 in allowed else 0, int(LOGITS.argmax())]


def test_order_bias_then_penalty():
    """As in vLLM: a penalty sees the biased logit."""
    found = constrained(logit_bias={17: 10.0}, repetition_penalty=2.0)
    assert found[17] == (LOGITS[17] + 10.0) / 2.0


def test_contradicting_constraints_still_give_a_token():
    params = {"allowed_token_ids": (2,), "min_tokens": 8}
    for temperature in (0.0, 1.0):
        token_ids = Sampler(EOS).sample(LOGITS[None].clone(), [row(**params, temperature=temperature)]).token_ids
        assert token_ids == [0]


def kept(logits: torch.Tensor, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> list[int]:
    weights = (logits - logits.max()).exp()[None]
    filters = Filters([top_k], [top_p], [min_p])
    return (weights >= thresholds(weights, filters)[:, None])[0].nonzero().flatten().tolist()


def warped(logits: torch.Tensor, *processors) -> list[int]:
    scores = logits[None].clone()
    for processor in processors:
        scores = processor(None, scores)
    return torch.isfinite(scores[0]).nonzero().flatten().tolist()


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("spread", [0.1, 3.0])
@pytest.mark.parametrize(("top_k", "top_p", "min_p"), [
    (1, 1.0, 0.0), (40, 1.0, 0.0), (10**6, 1.0, 0.0), (0, 0.9, 0.0), (0, 0.05, 0.0), (0, 0.9999, 0.0),
    (0, 1.0, 0.1), (50, 0.8, 0.0), (50, 0.8, 0.05), (0, 0.7, 0.02), (3000, 0.95, 0.0),
])  # fmt: skip
def test_filters_against_transformers(seed, spread, top_k, top_p, min_p):
    logits = torch.randn(5000, generator=torch.Generator().manual_seed(seed)) * spread
    processors = []
    if min_p:
        processors.append(transformers.MinPLogitsWarper(min_p))
    if top_k:
        processors.append(transformers.TopKLogitsWarper(min(top_k, 5000)))
    if top_p < 1:
        processors.append(transformers.TopPLogitsWarper(top_p))
    found, expected = kept(logits, top_k, top_p, min_p), warped(logits, *processors)
    # transformers sums in float32: it may differ by a token of vanishing weight at the edge.
    assert len(set(found) ^ set(expected)) <= (1 if top_p < 1 else 0)


def test_mixed_rows_are_filtered_as_if_alone():
    logits = torch.randn(6, 5000, generator=torch.Generator().manual_seed(8)) * torch.tensor([3.0, 0.1] * 3)[:, None]
    options = [(0, 1.0, 0.0), (5, 1.0, 0.0), (700, 0.9, 0.0), (0, 0.6, 0.0), (0, 0.999, 0.0), (0, 1.0, 0.2)]
    weights = (logits - logits.amax(1, keepdim=True)).exp()
    top_k, top_p, min_p = (torch.tensor(column) for column in zip(*options, strict=True))
    mask = weights >= thresholds(weights, Filters(top_k.tolist(), top_p.tolist(), min_p.tolist()))[:, None]
    for index, alone in enumerate(options):
        assert mask[index].nonzero().flatten().tolist() == kept(logits[index], *alone)


def test_ties_stay_together():
    logits = torch.tensor([3.0, 2.0, 1.0, 2.0, 2.0])
    assert kept(logits, top_k=2) == [0, 1, 3, 4]
    assert kept(logits, top_p=0.6) == [0, 1, 3, 4]


@pytest.mark.parametrize("vocab", [64 * 40, 64 * 40 + 1, 7])
def test_largest(vocab):
    weights = torch.rand(5, vocab, generator=torch.Generator().manual_seed(vocab))
    for count in (1, 3, 9, 2000):
        assert torch.equal(largest(weights, count), weights.sort(1, descending=True).values[:, :count])


def test_logprobs_are_the_models_own():
    params = {"temperature": 0.7, "top_k": 3, "logit_bias": {100: 50.0}, "repetition_penalty": 1.5, "logprobs": 4}
    logits = torch.stack([LOGITS, LOGITS.flip(0), LOGITS])
    rows = [row(**params), row(temperature=0.0), row(temperature=0.0, logprobs=0)]
    found = Sampler(EOS).sample(logits.clone(), rows)
    assert found.token_ids[0] == 100
    expected = torch.log_softmax(LOGITS.double(), 0)
    first, none, last = found.logprobs
    assert none is None and first is not None and last is not None
    assert first.token_id == 100 and first.logprob == pytest.approx(float(expected[100]), abs=1e-5)
    assert first.rank == int(LOGITS.gt(LOGITS[100]).sum()) + 1
    best = expected.topk(4)
    assert [token for token, _ in first.top] == best.indices.tolist()
    assert [value for _, value in first.top] == pytest.approx(best.values.tolist(), abs=1e-5)
    assert (last.token_id, last.rank, last.top) == (int(LOGITS.argmax()), 1, ())


def test_greedy_rows_among_drawn_ones():
    logits = torch.stack([LOGITS] * 3)
    rows = [row(temperature=0.0), row(temperature=1.0), row(temperature=0.0, logit_bias={200: 99.0})]
    token_ids = Sampler(EOS).sample(logits, rows).token_ids
    assert token_ids[0] == int(LOGITS.argmax()) and token_ids[2] == 200
