"""Verified drafts on a small model: the same tokens as without them, and the same distribution."""

import time

import numpy as np
import pytest
import torch
import transformers
from sampled_requests import PARAMS, PROMPT, requests_with

from warmroot.actors.engine.config import EngineConfig
from warmroot.actors.engine.engine import Engine
from warmroot.actors.models.loader import load_model
from warmroot.actors.runner.choice import choice_for, draw_weights
from warmroot.actors.runner.draft_layers import DraftModel, LayerSkip
from warmroot.actors.runner.drafting import Drafter
from warmroot.actors.runner.draw import Stream, draw, uniform
from warmroot.actors.runner.load import KvMemoryConfig, load_runner
from warmroot.actors.runner.load_drafter import skipped_layers
from warmroot.actors.runner.runner import ModelRunner
from warmroot.actors.runner.verify import DraftedRow, VerifyingChoice
from warmroot.cluster.errors import ConfigError
from warmroot.cluster.ids import RequestId
from warmroot.cluster.kv_layout import KvLayout
from warmroot.cluster.messages import GenerateRequest, TokenDelta
from warmroot.cluster.sampling_params import SamplingParams
from warmroot.cluster.speculative_config import SpeculativeConfig
from warmroot.kv_store.hashing import namespace_root

CPU = torch.device("cpu")
NGRAM = SpeculativeConfig(method="ngram", prompt_lookup_min=1, num_speculative_tokens=4, adaptive=False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
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
    return folder


@pytest.fixture(scope="module")
def decoder(folder):
    return load_model(folder, dtype="float32", device=CPU)


def make_engine(
    decoder, speculation: SpeculativeConfig | None, *, draft=None, num_blocks: int = 200, **options
) -> Engine:
    layout = KvLayout.of(decoder.spec.layer_windows, 4)

    def make_drafter(kv):
        if isinstance(draft, int):
            layers = LayerSkip(decoder, kv, draft)
        else:
            layers = DraftModel(draft, decoder.spec, layout, num_blocks, torch.float32)
        coupled = speculation.verification == "coupled"
        return Drafter(layers, choice_for(CPU), decoder.spec.eos_token_ids, 4, coupled=coupled)

    runner = ModelRunner(decoder, layout, num_blocks, make_drafter=None if draft is None else make_drafter)
    options = {"max_num_seqs": 8, "eos_token_ids": runner.eos_token_ids, "speculation": speculation} | options
    return Engine(runner, EngineConfig(max_model_len=200, **options), time.monotonic, namespace_root("test"))


def run(engine: Engine, **changed) -> dict[str, list[TokenDelta]]:
    deltas: dict[str, list[TokenDelta]] = {}
    for name, (prompt, params) in requests_with(PARAMS).items():
        deltas[name] = []
        engine.add(
            GenerateRequest(
                request_id=RequestId(name), prompt_token_ids=prompt, params=SamplingParams(**(params | changed))
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


@pytest.mark.parametrize(
    "options", [{}, {"num_blocks": 41}, {"max_num_batched_tokens": 20}, {"enable_prefix_caching": False}]
)
@pytest.mark.parametrize("draft", ["layers", "itself"])
@pytest.mark.parametrize("adaptive", [False, True])
def test_drafting_layers_change_nothing(decoder, draft, options, adaptive):
    plain = run(make_engine(decoder, None, **options))
    config = SpeculativeConfig(method="layer_skip", verification="coupled", adaptive=adaptive, num_speculative_tokens=3)
    engine = make_engine(decoder, config, draft=2 if draft == "layers" else decoder, **options)
    for _ in range(2):  # the second time prefixes are cached
        found = run(engine)
        assert {name: tokens(deltas) for name, deltas in found.items()} == {
            name: tokens(deltas) for name, deltas in plain.items()
        }
    assert engine.cache.pool.num_used == 0
    counts = engine.speculator.counts
    if draft == "itself" and not adaptive:
        # A model's own guesses, with the same draws, are always right: its pages are filled as they should be.
        assert counts.drafts > 50 and counts.accepted_tokens == counts.draft_tokens


def test_guesses_after_others_filled_the_prefix(decoder):
    """A drafting model fills pages that another request without drafts has left in the cache."""
    config = SpeculativeConfig(method="layer_skip", verification="coupled", adaptive=False)
    engine = make_engine(decoder, config, draft=decoder)
    run(engine, speculative=False)
    assert engine.speculator.counts.drafts == 0
    run(engine)
    counts = engine.speculator.counts
    assert counts.accepted_tokens == counts.draft_tokens > 100


def test_sampling_with_rejected_guesses_is_distributed_as_without(decoder):
    """Second and third token of many requests, against the model's own probabilities."""
    config = SpeculativeConfig(method="layer_skip", adaptive=False, num_speculative_tokens=2)
    options = {"max_num_seqs": 256, "max_num_batched_tokens": 4096, "num_blocks": 1500}
    engine = make_engine(decoder, config, draft=2, **options)
    params = {"temperature": 1.5, "top_k": 4, "max_tokens": 4, "logit_bias": {7: 1.0}, "ignore_eos": True}
    seen: dict[tuple[int, ...], int] = {}
    count = 6000
    outputs: dict[str, list[int]] = {}
    for seed in range(count):
        request_id = RequestId(f"r{seed}")
        engine.add(
            GenerateRequest(request_id=request_id, prompt_token_ids=PROMPT, params=SamplingParams(seed=seed, **params))
        )
        while engine.has_work and (seed % 200 == 199):
            for delta in engine.step():
                outputs.setdefault(delta.request_id, []).extend(delta.token_ids)
    for output in outputs.values():
        seen[tuple(output[:3])] = seen.get(tuple(output[:3]), 0) + 1
    counts = engine.speculator.counts
    assert len(outputs) == count and 0 < counts.accepted_tokens < counts.draft_tokens
    expected = exact_distribution(decoder, PROMPT, 3, SamplingParams(**params))
    assert set(seen) <= set(expected)
    likely = {run: p * count for run, p in expected.items() if p * count >= 5}
    statistic = sum((seen.get(run, 0) - wanted) ** 2 / wanted for run, wanted in likely.items())
    # Sixty degrees of freedom: a statistic above 1.66 of each comes once in a thousand times.
    assert len(likely) > 20 and statistic / (len(likely) - 1) < 1.66


def exact_distribution(decoder, prompt: list[int], length: int, params: SamplingParams) -> dict[tuple[int, ...], float]:
    """Probability of every run of tokens, by the plain runner's log-probabilities."""
    found = {(): 1.0}
    for _ in range(length):
        longer = {}
        for run, p in found.items():
            weights = next_weights(decoder, prompt + list(run), params)
            longer |= {(*run, token): p * float(weights[token]) for token in weights.nonzero().flatten().tolist()}
        found = longer
    return found


def next_weights(decoder, token_ids: list[int], params: SamplingParams) -> torch.Tensor:
    engine = make_engine(decoder, None)
    ask = SamplingParams(max_tokens=1, logprobs=20, temperature=0.0)
    engine.add(GenerateRequest(request_id=RequestId("ask"), prompt_token_ids=token_ids, params=ask))
    (delta,) = engine.step()
    logits = torch.full((1, decoder.spec.vocab_size), -50.0)
    for token, value in delta.logprobs[0].top:
        logits[0, token] = value + params.logit_bias.get(token, 0.0)
    row = DraftedRow(params, 0, 0, np.zeros(1, np.int32))
    weights = draw_weights(logits, [row])[0]
    return weights / weights.sum()


def test_a_drafting_model_shares_the_memory_for_pages(folder, decoder):
    kv = KvMemoryConfig(block_size=4, kv_cache_memory=2**20)
    alone = load_runner(folder, dtype="float32", kv=kv)
    config = SpeculativeConfig(
        method="draft_model", model=str(folder), adaptive=False, num_speculative_tokens=3, verification="coupled"
    )
    runner = load_runner(folder, dtype="float32", kv=kv, speculation=config, draft_path=folder)
    assert runner.num_blocks == alone.num_blocks // 2
    options = {"max_num_seqs": 8, "eos_token_ids": runner.eos_token_ids}
    settings = EngineConfig(max_model_len=200, speculation=config, **options)
    engine = Engine(runner, settings, time.monotonic, namespace_root("test"))
    found, plain = run(engine), run(make_engine(decoder, None))
    assert {name: tokens(deltas) for name, deltas in found.items()} == {
        name: tokens(deltas) for name, deltas in plain.items()
    }
    load = engine.load()
    assert load.num_draft_tokens == sum(load.accepted_by_place) > 100


def test_layers_that_cannot_draft(decoder):
    config = SpeculativeConfig(method="layer_skip", num_layers=3)
    with pytest.raises(ConfigError, match="num_layers must be less than the model's 3, got 3"):
        skipped_layers(config, decoder, None)


SETTINGS = {
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
        DraftedRow(params, row.seed, 0, row.token_ids, draft=draft, weights=q[0])
        for row, draft in zip(plain, drafts, strict=True)
    ]


def chi_square(counts: torch.Tensor, p: torch.Tensor) -> float:
    """Statistic over degrees of freedom."""
    assert not counts[p == 0].any(), "a token that a filter leaves out"
    kept = p > 0
    expected = p[kept] * counts.sum()
    return float(((counts[kept] - expected) ** 2 / expected).sum() / max(1, int(kept.sum()) - 1))


@pytest.mark.parametrize("params", SETTINGS.values(), ids=SETTINGS)
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
