"""The runner on a small model: log-probabilities, seeds, errors, calibration and memory sizes."""

import time

import pytest
import torch
import transformers

from warmroot.actors.engine.config import EngineConfig
from warmroot.actors.engine.engine import Engine
from warmroot.actors.engine.plan import StepPlan
from warmroot.actors.models.loader import load_model
from warmroot.actors.runner.calibration import calibrate
from warmroot.actors.runner.load import KvMemoryConfig, load_runner
from warmroot.actors.runner.memory import PageSizes, kv_blocks_for, page_bytes, useful_blocks
from warmroot.actors.runner.runner import ModelRunner
from warmroot.actors.runner.threaded import ThreadedExecutor
from warmroot.cluster.errors import ConfigError
from warmroot.cluster.ids import RequestId
from warmroot.cluster.kv_layout import KvLayout
from warmroot.cluster.messages import FinishReason, GenerateRequest, TokenDelta
from warmroot.cluster.sampling_params import SamplingParams
from warmroot.kv_store.hashing import namespace_root

PROMPT = torch.randint(4, 128, (37,), generator=torch.Generator().manual_seed(0)).tolist()


@pytest.fixture(scope="module")
def reference():
    torch.manual_seed(3)
    config = transformers.MistralConfig(
        vocab_size=128,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        sliding_window=None,
        eos_token_id=2,
    )
    model = transformers.MistralForCausalLM(config).eval()
    for parameter in model.parameters():
        parameter.data.normal_(0.0, 0.3)
    return model


@pytest.fixture(scope="module")
def folder(reference, tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    reference.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def decoder(folder):
    return load_model(folder, dtype="float32", device=torch.device("cpu"))


def make_runner(decoder, num_blocks: int = 64, block_size: int = 4) -> ModelRunner:
    return ModelRunner(decoder, KvLayout.of(decoder.spec.layer_windows, block_size), num_blocks)


def make_engine(runner: ModelRunner, **options) -> Engine:
    options = {"max_num_seqs": 8, "eos_token_ids": runner.eos_token_ids} | options
    return Engine(runner, EngineConfig(max_model_len=256, **options), time.monotonic, namespace_root("test"))


def request(name: str, prompt=PROMPT, output=(), **params) -> GenerateRequest:
    params = SamplingParams(**{"max_tokens": 12, "ignore_eos": True, "seed": 5} | params)
    return GenerateRequest(
        request_id=RequestId(name), prompt_token_ids=list(prompt), output_token_ids=list(output), params=params
    )


def run(engine: Engine, *requests: GenerateRequest) -> dict[str, list[TokenDelta]]:
    for source in requests:
        engine.add(source)
    deltas: dict[str, list[TokenDelta]] = {source.request_id: [] for source in requests}
    while engine.has_work:
        for delta in engine.step():
            deltas[delta.request_id].append(delta)
    return deltas


def tokens(deltas: list[TokenDelta]) -> list[int]:
    return [token for delta in deltas for token in delta.token_ids]


@torch.no_grad()
def reference_logprobs(model, token_ids: list[int]) -> torch.Tensor:
    return model(torch.tensor([token_ids])).logits[0].double().log_softmax(-1)


@pytest.mark.parametrize("budget", [2048, 8])
def test_logprobs_of_prompt_and_output(decoder, reference, budget):
    engine = make_engine(make_runner(decoder), max_num_batched_tokens=budget)
    run(engine, request("warm", max_tokens=1))  # what is cached must not shorten the list
    found = run(engine, request("a", logprobs=3, prompt_logprobs=2))["a"]
    output = tokens(found)
    expected = reference_logprobs(reference, PROMPT + output)
    first, *entries = next(delta.prompt_logprobs for delta in found if delta.prompt_logprobs is not None)
    assert first is None and len(entries) == len(PROMPT) - 1
    entries += [entry for delta in found for entry in delta.logprobs]
    assert len(entries) == len(PROMPT) + len(output) - 1
    for position, entry in enumerate(entries):
        row, token = expected[position], (PROMPT + output)[position + 1]
        assert entry.token_id == token and entry.logprob == pytest.approx(float(row[token]), abs=1e-4)
        assert entry.rank == int((row > row[token]).sum()) + 1
        best = row.topk(len(entry.top))
        assert [token for token, _ in entry.top] == best.indices.tolist()
        assert len(entry.top) == (2 if position < len(PROMPT) - 1 else 3)


def test_seeded_output_does_not_depend_on_company_preemption_or_replica(decoder):
    wanted = tokens(run(make_engine(make_runner(decoder)), request("a", top_p=0.95))["a"])
    assert len(set(wanted)) > 3
    others = [request(f"x{i}", PROMPT[i:], seed=i, temperature=1.5, max_tokens=30) for i in range(5)]
    crowded = run(make_engine(make_runner(decoder)), *others[:3], request("a", top_p=0.95), *others[3:])
    assert tokens(crowded["a"]) == wanted
    runner, plans = make_runner(decoder, num_blocks=24), []
    runner.submit = lambda plan: (plans.append(plan), ModelRunner.submit(runner, plan))
    tight = run(make_engine(runner, enable_prefix_caching=False), others[0], request("a", top_p=0.95))
    assert tokens(tight["a"]) == wanted
    assert sum(new.request_id == "a" for plan in plans for new in plan.new) > 1
    resumed = run(make_engine(make_runner(decoder)), request("a", output=wanted[:5], top_p=0.95))["a"]
    assert tokens(resumed) == wanted[5:] and resumed[0].index == 5
    assert tokens(run(make_engine(make_runner(decoder)), request("a", top_p=0.95, seed=6))["a"]) != wanted


def test_two_steps_in_flight_say_the_same(decoder):
    """On pages that are too few, with draws, penalties, log-probabilities and ends that nobody could foresee."""
    variants = [{}, {"temperature": 0.0}, {"frequency_penalty": 1.0}, {"logprobs": 1}, {"stop_token_ids": (7, 9, 70)}]
    requests = [
        request(f"r{n}", PROMPT[n % 7 : 8 + 2 * n], seed=n, max_tokens=40, **variants[n % len(variants)])
        for n in range(15)
    ]
    found = []
    for wrap in (lambda runner: runner, ThreadedExecutor):
        executor = wrap(make_runner(decoder, num_blocks=40))
        config = EngineConfig(max_model_len=100, max_num_seqs=8, max_num_batched_tokens=16)
        engine = Engine(executor, config, time.monotonic, namespace_root("test"))
        deltas = run(engine, *requests)
        found.append({name: (tokens(said), said[-1].finish_reason) for name, said in deltas.items()})
        executor.shutdown()
    assert found[0] == found[1]
    assert {reason for _, reason in found[0].values()} == {FinishReason.LENGTH, FinishReason.STOP}


def test_penalties_see_the_growing_output(decoder):
    params = {"temperature": 0.0, "max_tokens": 40}
    biased = params | {"logit_bias": {7: 60.0}}
    assert tokens(run(make_engine(make_runner(decoder)), request("a", **biased))["a"]) == [7] * 40
    found = tokens(run(make_engine(make_runner(decoder)), request("a", **biased, frequency_penalty=2.0))["a"])
    # Each 7 costs it 2, so it wins about 30 times.
    assert found[:15] == [7] * 15 and 20 < found.count(7) < 40
    banned = request("a", **params, bad_words_token_ids=tuple((token,) for token in range(64)))
    assert min(tokens(run(make_engine(make_runner(decoder)), banned)["a"])) >= 64


def test_min_tokens_and_stop_tokens(decoder):
    stops = tuple(range(3, 128))
    params = {"ignore_eos": False, "stop_token_ids": stops, "min_tokens": 0}
    engine = make_engine(make_runner(decoder))
    short = run(engine, request("a", **params))["a"]
    assert len(tokens(short)) == 1 and short[-1].finish_reason is FinishReason.STOP
    long = run(engine, request("b", **params | {"min_tokens": 6}))["b"]
    assert set(tokens(long)[:6]) <= {0, 1} and len(tokens(long)) >= 7


def test_a_failing_step_is_one_line(decoder, caplog):
    runner = make_runner(decoder)
    engine = make_engine(runner)
    deltas = run(engine, request("a", prompt=[5, 100_000]))["a"]  # no vocab_size in the engine's configuration
    assert deltas[-1].finish_reason is FinishReason.LOST
    assert "IndexError" in deltas[-1].error and "\n" not in deltas[-1].error
    assert "Traceback" in caplog.text
    # A plan without sequences only clears up.
    runner.submit(StepPlan(step=9, finished=(RequestId("a"),)))
    assert runner.result().error is None


def test_calibration_leaves_no_trace(decoder):
    for num_blocks in (64, 3):
        runner = make_runner(decoder, num_blocks=num_blocks)
        rates = calibrate(runner)
        assert rates.prefill_tokens_per_s > 0 and rates.decode_step_s > 0
    runner = make_runner(decoder)
    calibrate(runner)
    params = {"temperature": 0.0}
    plain = tokens(run(make_engine(make_runner(decoder)), request("a", **params))["a"])
    assert tokens(run(make_engine(runner), request("a", **params))["a"]) == plain


def test_memory_sizes(decoder):
    layout = KvLayout.of(decoder.spec.layer_windows, 16)
    size = page_bytes(decoder.spec, layout, torch.float32)
    assert size == 2 * 16 * 2 * 2 * 8 * 4  # layers, tokens, k and v, heads, head_dim, bytes
    assert page_bytes(decoder.spec, layout, torch.float16) == size // 2
    assert kv_blocks_for(PageSizes(size), 10 * size + 1, layout) == 10
    with pytest.raises(ConfigError, match="hold 1 KV blocks"):
        kv_blocks_for(PageSizes(size), size, layout)
    assert useful_blocks(layout, max_model_len=100, max_num_seqs=3) == 1 + 3 * 7
    assert useful_blocks(KvLayout.of((None, 32), 16), max_model_len=100, max_num_seqs=1) == 1 + 7 + 3


def test_load_runner(folder):
    runner = load_runner(folder, dtype="float32", kv=KvMemoryConfig(kv_cache_memory=2**20, kv_cache_dtype="fp16"))
    assert runner.kv_dtype == torch.float16 and runner.num_blocks == 2**20 // (2 * 16 * 2 * 2 * 8 * 2)
    bounded = load_runner(folder, dtype="float32", kv=KvMemoryConfig(), max_model_len=64, max_num_seqs=2)
    assert bounded.num_blocks == 2 * (1 + 2 * 4)
    assert load_runner(folder, kv=KvMemoryConfig(num_kv_blocks=33)).num_blocks == 33
    for wrong in ({"kv": KvMemoryConfig(kv_cache_dtype="int3")}, {"kv": KvMemoryConfig(), "max_model_len": 999}):
        with pytest.raises(ConfigError):
            load_runner(folder, **wrong)
