"""Verified drafts on a small model: the same tokens as without them, and the same distribution."""

import time

import numpy as np
import pytest
import torch
import transformers

from warmroot.actors.engine.config import EngineConfig
from warmroot.actors.engine.engine import Engine
from warmroot.actors.models.loader import load_model
from warmroot.actors.runner.choice import choice_for, draw_weights
from warmroot.actors.runner.draw import Stream, draw, uniform
from warmroot.actors.runner.runner import ModelRunner
from warmroot.actors.runner.verify import DraftedRow, VerifyingChoice, num_accepted
from warmroot.cluster.ids import RequestId
from warmroot.cluster.kv_layout import KvLayout
from warmroot.cluster.messages import GenerateRequest, TokenDelta
from warmroot.cluster.sampling_params import SamplingParams
from warmroot.cluster.speculative_config import SpeculativeConfig
from warmroot.kv_store.hashing import namespace_root

CPU = torch.device("cpu")
PROMPT = [5, 9, 7, 11, 5, 9, 7, 11, 5, 9]
NGRAM = SpeculativeConfig(method="ngram", prompt_lookup_min=1, num_speculative_tokens=4, adaptive=False)
REQUESTS = {
    "greedy": {"temperature": 0.0},
    "plain": {"temperature": 0.4},
    "filters": {"top_p": 0.8, "top_k": 6, "min_p": 0.05, "temperature": 0.7},
    "penalties": {"temperature": 0.0, "presence_penalty": 0.7, "frequency_penalty": 0.4, "repetition_penalty": 1.2},
    "bias": {"temperature": 0.5, "logit_bias": {5: 3.0, 9: 2.0}, "frequency_penalty": 0.1},
    "allowed": {"temperature": 0.6, "allowed_token_ids": (5, 7, 9, 11, 2)},
    "bad": {"temperature": 0.0, "bad_words_token_ids": ((5, 9), (7,))},
    "stop": {"temperature": 0.5, "ignore_eos": False, "stop_token_ids": (11,), "min_tokens": 9, "max_tokens": 60},
    "logprobs": {"temperature": 0.3, "logprobs": 2, "prompt_logprobs": 1},
}


@pytest.fixture(scope="module")
def decoder(tmp_path_factory):
    """A model that repeats itself."""
    torch.manual_seed(3)
    config = transformers.LlamaConfig(
        vocab_size=24,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        eos_token_id=2,
    )
    model = transformers.LlamaForCausalLM(config).eval()
    for parameter in model.parameters():
        parameter.data.normal_(0.0, 0.25)
    folder = tmp_path_factory.mktemp("model")
    model.save_pretrained(folder)
    return load_model(folder, dtype="float32", device=CPU)


def make_engine(decoder, speculation: SpeculativeConfig | None, *, num_blocks: int = 200, **options) -> Engine:
    runner = ModelRunner(decoder, KvLayout.of(decoder.spec.layer_windows, 4), num_blocks)
    options = {"max_num_seqs": 8, "eos_token_ids": runner.eos_token_ids, "speculation": speculation} | options
    return Engine(runner, EngineConfig(max_model_len=200, **options), time.monotonic, namespace_root("test"))


def run(engine: Engine, **changed) -> dict[str, list[TokenDelta]]:
    deltas: dict[str, list[TokenDelta]] = {}
    for seed, (name, params) in enumerate(REQUESTS.items()):
        given = {"max_tokens": 40, "ignore_eos": True, "seed": seed} | params | changed
        deltas[name] = []
        engine.add(
            GenerateRequest(
                request_id=RequestId(name),
                prompt_token_ids=[*PROMPT, seed + 3],
                params=SamplingParams(**given),
            )
        )
    while engine.has_work:
        for delta in engine.step():
            deltas[delta.request_id].append(delta)
    return deltas


def tokens(deltas: list[TokenDelta]) -> list[int]:
    return [token for delta in deltas for token in delta.token_ids]


def entries(deltas: list[TokenDelta]) -> list:
    return [entry for delta in deltas for entry in delta.logprobs or ()]


@pytest.mark.parametrize(
    "options", [{}, {"num_blocks": 41}, {"max_num_batched_tokens": 20}, {"enable_prefix_caching": False}]
)
def test_whatever_is_asked_for_drafts_change_nothing(decoder, options):
    plain = run(make_engine(decoder, None, **options))
    engine = make_engine(decoder, NGRAM, **options)
    found = run(engine)
    assert {name: tokens(deltas) for name, deltas in found.items()} == {
        name: tokens(deltas) for name, deltas in plain.items()
    }
    assert [found[name][-1].finish_reason for name in found] == [plain[name][-1].finish_reason for name in plain]
    assert engine.speculator.counts.accepted_tokens > 30
    assert engine.cache.pool.num_used == 0
    ours, theirs = entries(found["logprobs"]), entries(plain["logprobs"])
    assert [entry.token_id for entry in ours] == tokens(found["logprobs"])
    for one, other in zip(ours, theirs, strict=True):
        assert one.logprob == pytest.approx(other.logprob, abs=1e-5)
        assert (one.rank, [token for token, _ in one.top]) == (other.rank, [token for token, _ in other.top])


def test_a_draft_stands_up_to_its_first_error():
    assert num_accepted([1, 2, 3], [1, 2, 3, 4]) == 3
    assert num_accepted([1, 2, 3], [1, 5, 3, 4]) == 1
    assert num_accepted([], [4]) == 0


PARAMS = {
    "temperature 1": SamplingParams(),
    "temperature 0.7, top-p": SamplingParams(temperature=0.7, top_p=0.9),
    "top-k, min-p": SamplingParams(temperature=1.3, top_k=5, min_p=0.05),
}


def rows_with_drafts(params, q_logits, count, *, first_seed=0):
    """Rows whose drafts were drawn from q."""
    plain = [DraftedRow(params, first_seed + seed, 0, np.zeros(3, np.int32)) for seed in range(count)]
    q = draw_weights(q_logits.expand(count, -1).clone(), plain)
    q /= q.sum(1, keepdim=True)
    numbers = torch.tensor([uniform(row.seed, row.num_output, Stream.DRAFT) for row in plain], dtype=torch.float64)
    drafts = draw(q, numbers).tolist()
    return [
        DraftedRow(params, row.seed, 0, row.token_ids, draft, q[0]) for row, draft in zip(plain, drafts, strict=True)
    ]


def chi_square(counts: torch.Tensor, p: torch.Tensor) -> float:
    """Statistic over degrees of freedom."""
    assert not counts[p == 0].any(), "a token that a filter leaves out"
    kept = p > 0
    expected = p[kept] * counts.sum()
    return float(((counts[kept] - expected) ** 2 / expected).sum() / max(1, int(kept.sum()) - 1))


@pytest.mark.parametrize("params", PARAMS.values(), ids=PARAMS)
def test_rejection_keeps_the_distribution_and_accepts_as_often_as_can_be(params):
    generator = torch.Generator().manual_seed(1)
    p_logits, count = torch.randn(1, 12, generator=generator) * 1.5, 60_000
    q_logits = p_logits + torch.randn(1, 12, generator=generator)
    rows = rows_with_drafts(params, q_logits, count)
    verify = VerifyingChoice(choice_for(CPU))
    chosen = verify.choose(p_logits.expand(count, -1).clone(), rows)
    p = draw_weights(p_logits.clone(), rows[:1])[0]
    p = p / p.sum()
    counts = torch.bincount(chosen, minlength=12).double()
    # 11 degrees of freedom: beyond 2.9 lies one in a thousand.
    assert chi_square(counts, p.double()) < 2.9
    drafts = torch.tensor([row.draft for row in rows])
    accepted = (chosen == drafts).double().mean()
    assert float(accepted) == pytest.approx(float(torch.minimum(p, rows[0].weights).sum()), abs=0.01)


def test_drafts_without_a_distribution_leave_the_draw_as_it_is():
    generator = torch.Generator().manual_seed(2)
    logits, count = torch.randn(1, 12, generator=generator), 20_000
    rows = [DraftedRow(SamplingParams(), seed, 0, np.zeros(3, np.int32), draft=3) for seed in range(count)]
    plain = choice_for(CPU).choose(logits.expand(count, -1).clone(), rows)
    found = VerifyingChoice(choice_for(CPU)).choose(logits.expand(count, -1).clone(), rows)
    assert torch.equal(found, plain)


def test_typical_acceptance_is_asked_for_and_lossy():
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]])
    p = logits.softmax(1)[0]
    rows = [DraftedRow(SamplingParams(), seed, 0, np.zeros(3, np.int32), draft=1) for seed in range(2000)]
    exact, lossy, strict = (
        (VerifyingChoice(choice_for(CPU), alpha).choose(logits.expand(2000, -1).clone(), rows) == 1).double().mean()
        for alpha in (None, 0.1, 0.9)
    )
    assert float(exact) == pytest.approx(float(p[1]), abs=0.03)
    assert float(lossy) == 1.0 and float(strict) == pytest.approx(float(p[1]), abs=0.03)
    # Greedy rows are never touched by it.
    greedy = [DraftedRow(SamplingParams(temperature=0.0), 0, 0, np.zeros(3, np.int32), draft=1)]
    assert VerifyingChoice(choice_for(CPU), 0.1).choose(logits.clone(), greedy).tolist() == [0]


def test_streams_of_numbers_are_independent():
    numbers = np.array([[uniform(seed, 5, stream) for stream in Stream] for seed in range(4000)])
    assert np.abs(np.corrcoef(numbers.T) - np.eye(3)).max() < 0.06
    assert abs(numbers.mean(0) - 0.5).max() < 0.02
