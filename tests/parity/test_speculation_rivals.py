"""Where other engines go wrong with drafts: parameters that are refused or ignored, log-probabilities that are not the
model's, cached prefixes that spoil what follows, output that preemption makes stale or cuts short.
"""

import time
from pathlib import Path

import pytest
import torch
import transformers

from warmroot.actors.engine.config import EngineConfig
from warmroot.actors.engine.engine import Engine
from warmroot.actors.engine.scheduler import Scheduler
from warmroot.actors.runner.load import KvMemoryConfig, load_runner
from warmroot.cluster.ids import RequestId
from warmroot.cluster.messages import FinishReason, GenerateRequest, TokenDelta
from warmroot.cluster.sampling_params import SamplingParams
from warmroot.cluster.speculative_config import SpeculativeConfig
from warmroot.kv_store.hashing import namespace_root

from .conftest import Family

METHODS = {
    "ngram": {"method": "ngram", "prompt_lookup_min": 1},
    "draft_model": {"method": "draft_model", "model": "small", "verification": "coupled"},
    "layer_skip": {"method": "layer_skip", "num_layers": 3, "verification": "coupled"},
}
SETTINGS = {
    "min_p": {"min_p": 0.2},
    "logit_bias": {"temperature": 0.0, "logit_bias": {17: 6.0, 40: -100.0}},
    "presence_penalty": {"temperature": 0.0, "presence_penalty": 2.0},
    "frequency_penalty": {"temperature": 0.0, "frequency_penalty": 1.5},
    "repetition_penalty": {"temperature": 0.0, "repetition_penalty": 1.8},
    "min_tokens": {"temperature": 0.0, "min_tokens": 30, "stop_token_ids": tuple(range(128))},
}
PROMPT = [9, 30, 77, 12, 9, 30, 77, 12, 9, 30, 77, 12, 9, 30]
LENGTH = 40


@pytest.fixture(scope="module")
def model() -> transformers.PreTrainedModel:
    """Its last layer adds little, and it likes to repeat itself."""
    sizes = {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 128}
    model = Family("LlamaForCausalLM", sizes).build()
    for name, parameter in model.model.layers[-1].named_parameters():
        if "o_proj" in name or "down_proj" in name:
            parameter.data *= 0.1
    return model


@pytest.fixture(scope="module")
def folders(model, tmp_path_factory) -> tuple[Path, Path]:
    """Of the model, and of one that drafts: all but its last layer."""
    paths = tmp_path_factory.mktemp("model"), tmp_path_factory.mktemp("small")
    model.save_pretrained(paths[0])
    small = transformers.AutoModelForCausalLM.from_pretrained(paths[0], dtype=torch.float32)
    small.model.layers = small.model.layers[:-1]
    small.config.num_hidden_layers -= 1
    small.save_pretrained(paths[1])
    return paths


def make_engine(folders: tuple[Path, Path], method: str | None, *, num_blocks: int = 200, **options) -> Engine:
    speculation = None
    if method is not None:
        speculation = SpeculativeConfig(**METHODS[method], adaptive=False, num_speculative_tokens=3)
    runner = load_runner(
        folders[0],
        dtype="float32",
        kv=KvMemoryConfig(block_size=4, num_kv_blocks=num_blocks),
        speculation=speculation,
        draft_path=folders[1] if method == "draft_model" else None,
    )
    options = {"max_model_len": 128, "max_num_seqs": 8, "max_num_batched_tokens": 64} | options
    return Engine(runner, EngineConfig(speculation=speculation, **options), time.monotonic, namespace_root("test"))


def run(engine: Engine, prompts: dict[str, list[int]], **params) -> dict[str, list[TokenDelta]]:
    deltas: dict[str, list[TokenDelta]] = {name: [] for name in prompts}
    for seed, (name, prompt) in enumerate(prompts.items()):
        asked = SamplingParams(**{"max_tokens": LENGTH, "ignore_eos": True, "seed": seed} | params)
        engine.add(GenerateRequest(request_id=RequestId(name), prompt_token_ids=prompt, params=asked))
    while engine.has_work:
        for delta in engine.step():
            deltas[delta.request_id].append(delta)
    assert engine.load().kv_used_blocks == 0
    return deltas


def tokens(deltas: list[TokenDelta]) -> list[int]:
    return [token for delta in deltas for token in delta.token_ids]


@pytest.mark.parametrize("method", METHODS)
def test_nothing_is_refused_or_ignored(folders, method):
    """vLLM #42744, #34497, #9834."""
    plain, drafting = make_engine(folders, None), make_engine(folders, method)
    for name, params in SETTINGS.items():
        without = {key: params[key] for key in params if key == "temperature"}
        expected = tokens(run(plain, {"a": PROMPT}, **params)["a"])
        assert expected != tokens(run(plain, {"a": PROMPT}, **without)["a"]), f"{name} changes nothing"
        assert tokens(run(drafting, {"a": PROMPT}, **params)["a"]) == expected, name
    assert drafting.speculator.counts.accepted_tokens > 20


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("method", METHODS)
def test_log_probabilities_are_the_models(folders, model, method, temperature):
    """vLLM #38202: of every token, whether it was drafted, rejected for another, or came behind a draft."""
    engine = make_engine(folders, method)
    bias = dict.fromkeys(PROMPT, 6.0)  # so that the prompt is repeated, here and there
    deltas = run(engine, {"a": PROMPT}, logprobs=3, temperature=temperature, logit_bias=bias, top_k=20)["a"]
    counts, output = engine.speculator.counts, tokens(deltas)
    assert 0 < counts.accepted_tokens <= counts.draft_tokens - bool(temperature)
    with torch.no_grad():
        logits = model(torch.tensor([PROMPT + output])).logits[0, len(PROMPT) - 1 : -1]
    expected = logits.log_softmax(-1)
    entries = [entry for delta in deltas for entry in delta.logprobs]
    assert [entry.token_id for entry in entries] == output
    for entry, row in zip(entries, expected, strict=True):
        assert entry.logprob == pytest.approx(float(row[entry.token_id]), abs=2e-4)
        assert entry.rank == int((row > row[entry.token_id]).sum()) + 1
        assert [token for token, _ in entry.top] == row.topk(3).indices.tolist()


@pytest.mark.parametrize("method", METHODS)
def test_cached_prefixes_spoil_nothing(folders, method):
    """vLLM #43559: neither what is generated nor how often guesses are right, also behind a part of a block."""
    turns = {f"{cut}": PROMPT * 3 + PROMPT[:cut] for cut in range(1, 9)}
    expected = {name: tokens(found) for name, found in run(make_engine(folders, None), turns).items()}
    cold = make_engine(folders, method, enable_prefix_caching=False)
    warm = make_engine(folders, method)
    rates: list[float] = []
    for engine in (cold, warm, warm):
        before = engine.load()
        found = run(engine, turns)
        assert {name: tokens(deltas) for name, deltas in found.items()} == expected
        after = engine.load()
        accepted = sum(after.accepted_by_place) - sum(before.accepted_by_place)
        rates.append(accepted / (after.num_draft_tokens - before.num_draft_tokens))
    assert all(found[name][0].cached_tokens >= len(turns[name]) - 4 for name in turns)
    assert rates[1] == pytest.approx(rates[0], abs=0.02) and rates[2] == pytest.approx(rates[0], abs=0.02)


@pytest.mark.parametrize("method", METHODS)
def test_preemption_leaves_nothing_stale_and_cuts_nothing_short(folders, method, monkeypatch):
    """vLLM #41190, #49620, #16832: also where all that run are thrown out again and again, drafts in hand."""
    prompts = {f"r{index}": [*PROMPT, index + 20] for index in range(6)}
    expected = {name: tokens(found) for name, found in run(make_engine(folders, None), prompts).items()}
    engine = make_engine(folders, method, num_blocks=45)
    schedule, steps = Scheduler.schedule, iter(range(100_000))

    def thrown_out(scheduler, step, **options):
        if next(steps) % 5 == 4:
            for request in [one for one in scheduler.running if not one.num_in_flight]:
                scheduler.running.remove(request)
                scheduler._let_go(request)
                request.requeue()
                scheduler.waiting.add(request)
        return schedule(scheduler, step, **options)

    monkeypatch.setattr(Scheduler, "schedule", thrown_out)
    found = run(engine, prompts)
    assert {name: tokens(deltas) for name, deltas in found.items()} == expected
    assert {deltas[-1].finish_reason for deltas in found.values()} == {FinishReason.LENGTH}
    assert all(len(output) == LENGTH for output in expected.values())
    assert engine.speculator.counts.accepted_tokens > 0
