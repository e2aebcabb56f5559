"""Three hundred requests that ask for everything at once, over quantised pages of which there are too few.

Prompts share prefixes that the cache holds, clients leave in between, urgent requests push others out. With drafts
every one of them gets what it gets alone in time and without drafts, and in the end no page is held.
"""

import asyncio
import json
import random
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import small_tokenizers
import torch
import transformers
from medusa_harness import fitted_outputs, save_heads, texts_of

from warmroot.actors.engine.scheduler import Scheduler
from warmroot.actors.engine_host import EngineHost
from warmroot.actors.local_engine import LocalGenerator
from warmroot.actors.models.source import resolve_model
from warmroot.cluster.config import WarmrootConfig
from warmroot.cluster.errors import ModelLoadError
from warmroot.cluster.sampling_params import SamplingParams
from warmroot.router.frontend import Frontend

NUM_REQUESTS = 300
KEYS = {
    "dtype": "float32",
    "quantization": "none",
    "kv_cache_dtype": "int8",
    "max_num_seqs": 12,
    "max_queue_wait": 0.0,  # all come at once
}
PLENTY, TOO_FEW = 2000, 44
METHODS = {
    "ngram": {"method": "ngram", "prompt_lookup_min": 1, "num_speculative_tokens": 5},
    "draft_model": {"method": "draft_model", "num_speculative_tokens": 4},
    "layer_skip": {"method": "layer_skip", "num_layers": 3, "num_speculative_tokens": 12},
    "medusa": {"method": "medusa", "num_speculative_tokens": 8},
}
"""The longest drafts reach over a whole block. Over quantised pages, Medusa's are chains."""
CUTS = {"tp2": {"tensor_parallel_size": 2}, "pp2": {"pipeline_parallel_size": 2}}
SHARED = ("hello world the end ", "stop the world hello the end of the world ", "the the the end end end ")


@dataclass(frozen=True)
class Asked:
    """A request, and after how many tokens its client leaves (None: it stays)."""

    prompt: str
    params: SamplingParams
    priority: int
    salt: str
    leaves_after: int | None


@dataclass
class Answer:
    """What the choices of a request were given."""

    tokens: dict[int, list[int]] = field(default_factory=dict)
    text: dict[int, str] = field(default_factory=dict)
    ends: dict[int, tuple] = field(default_factory=dict)
    logprobs: list[float] = field(default_factory=list)
    cached: int = 0


def requests() -> list[Asked]:
    return [_request(random.Random(number)) for number in range(NUM_REQUESTS)]


def _request(draw: random.Random) -> Asked:
    prompt = draw.choice(SHARED) * draw.choice((5, 5, 7)) + " ".join(
        draw.choices(small_tokenizers.WORDS, k=draw.randrange(6))
    )
    params: dict = {
        "max_tokens": draw.randrange(4, 90),
        "temperature": draw.choice((0.0, 0.0, 0.6, 1.0)),
        "seed": draw.randrange(1 << 40),
        "ignore_eos": draw.random() < 0.8,
    }
    for chance, keys in (
        (0.3, {"top_p": 0.8}),
        (0.3, {"top_k": 12}),
        (0.2, {"min_p": 0.02}),
        (0.2, {"presence_penalty": 0.5, "frequency_penalty": 0.3}),
        (0.2, {"repetition_penalty": 1.15}),
        (0.2, {"logit_bias": {ord("a"): 2.0, ord("e"): -3.0}}),
        (0.1, {"allowed_token_ids": tuple(range(40, 200))}),
        (0.1, {"bad_words": ("the", " end")}),
        (0.2, {"stop": ("a", "Z", "the"), "include_stop_str_in_output": True}),
        (0.2, {"stop_token_ids": (65, 97, 120)}),
        (0.2, {"min_tokens": 4}),
        (0.2, {"logprobs": 3}),
        (0.1, {"prompt_logprobs": 1}),
        (0.1, {"n": 3}),
        (0.1, {"speculative": False}),
    ):
        if draw.random() < chance:
            params |= keys
    leaves_after = draw.randrange(12) if draw.random() < 0.15 else None
    return Asked(
        prompt, SamplingParams(**params), draw.choice((0, 0, 0, -1, 1)), draw.choice(("", "", "x")), leaves_after
    )


async def answers(frontend: Frontend, asked: Sequence[Asked]) -> list[Answer]:
    return list(await asyncio.gather(*(_answer(frontend, one) for one in asked)))


async def _answer(frontend: Frontend, asked: Asked) -> Answer:
    answer = Answer()
    prompt = frontend.tokenize(asked.prompt)
    stream = frontend.stream(prompt, asked.params, priority=asked.priority, cache_salt=asked.salt)
    async with aclosing(stream) as deltas:
        async for delta in deltas:
            answer.tokens.setdefault(delta.index, []).extend(delta.token_ids)
            answer.text[delta.index] = answer.text.get(delta.index, "") + delta.text
            answer.logprobs += [entry.logprob for entry in delta.logprobs or ()] if delta.index == 0 else []
            answer.cached += delta.cached_tokens or 0
            if delta.finish_reason is not None:
                answer.ends[delta.index] = (delta.finish_reason, delta.stop_reason)
            if asked.leaves_after is not None and len(answer.tokens[delta.index]) > asked.leaves_after:
                break
    return answer


@dataclass
class Run:
    """What came of a mix."""

    answers: list[Answer]
    accepted: int = 0
    drafted: int = 0
    restarts: int = 0


def run(model: str, asked: Sequence[Asked], **keys) -> Run:
    """All requests at once through frontend and engine. Nothing is held when they are done."""
    preempted: list[object] = []
    preempt = Scheduler._preempt

    def counted(scheduler, request, work):
        preempted.append(request.id)
        preempt(scheduler, request, work)

    async def served() -> Run:
        host = EngineHost.load(WarmrootConfig.of(model, **{**KEYS, **keys}), lambda *_: None)
        generator = LocalGenerator(host.start, asyncio.get_running_loop())
        try:
            frontend = Frontend(
                generator,
                host.tokenizer,
                model=model,
                max_model_len=min(host.max_model_len, generator.engine.max_tokens),
                vocab_size=host.model.spec.vocab_size,
            )
            found = await answers(frontend, asked)
            while generator.engine.load().running:
                await asyncio.sleep(0.01)  # who has left is let go when the step is done
            load = generator.engine.load()
            assert (load.waiting, load.kv_used_blocks) == (0, 0)
            return Run(found, sum(load.accepted_by_place), load.num_draft_tokens, len(preempted))
        finally:
            generator.close()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Scheduler, "_preempt", counted)
        return asyncio.run(served())


def assert_equal(found: Sequence[Answer], expected: Sequence[Answer], asked: Sequence[Asked]) -> None:
    for number, (mine, theirs, request) in enumerate(zip(found, expected, asked, strict=True)):
        if request.leaves_after is not None:
            for index in mine.tokens.keys() & theirs.tokens.keys():
                length = min(len(mine.tokens[index]), len(theirs.tokens[index]))
                assert mine.tokens[index][:length] == theirs.tokens[index][:length], (number, request)
            continue
        assert (mine.tokens, mine.text, mine.ends) == (theirs.tokens, theirs.text, theirs.ends), (number, request)
        assert mine.logprobs == pytest.approx(theirs.logprobs, abs=2e-3), (number, request)


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> tuple[Path, Path]:
    """A small model whose last layer adds little, and one without that layer."""
    tokenizer = small_tokenizers.byte_level()
    torch.manual_seed(1)
    config = transformers.LlamaConfig(
        vocab_size=tokenizer.vocab_size,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=tokenizer.bos_token_id,
    )
    model = transformers.AutoModelForCausalLM.from_config(config)
    for name, parameter in model.named_parameters():
        parameter.data.normal_(0.0, 0.03 if "layers.3" in name and ("o_proj" in name or "down" in name) else 0.25)
    paths = tmp_path_factory.mktemp("model"), tmp_path_factory.mktemp("small")
    for path in paths:
        model.save_pretrained(path)
        (path / "tokenizer.json").write_text(tokenizer.to_dict()["tokenizer"])
        (path / "tokenizer_config.json").write_text(json.dumps(tokenizer.special_tokens))
        model.model.layers = model.model.layers[:3]
        model.config.num_hidden_layers = 3
    return paths


@pytest.fixture(scope="module")
def heads(folders, tmp_path_factory) -> Path:
    model = transformers.AutoModelForCausalLM.from_pretrained(folders[0], dtype=torch.float32).eval()
    return save_heads(tmp_path_factory.mktemp("heads"), fitted_outputs(model, texts_of(model), 3))


@pytest.fixture(scope="module")
def expected(folders):
    """What one answers without drafts, with pages for all, by its other keys."""
    found: dict[str, list[Answer]] = {}

    def get(**keys) -> list[Answer]:
        name = repr(keys)
        if name not in found:
            found[name] = run(str(folders[0]), requests(), num_kv_blocks=PLENTY, **keys).answers
        return found[name]

    return get


@pytest.fixture(scope="module")
def speculation(folders, heads):
    """Configurations by the method's name."""
    models = {"draft_model": {"model": str(folders[1])}, "medusa": {"model": str(heads)}}

    def get(method: str) -> dict:
        return {**METHODS[method], **models.get(method, {}), "adaptive": False, "verification": "coupled"}

    return get


def check(found: Run, expected: Sequence[Answer]) -> None:
    assert_equal(found.answers, expected, requests())
    assert found.restarts > 3
    assert found.accepted > 200
    assert sum(answer.cached for answer in found.answers) > 1000


@pytest.mark.parametrize("method", METHODS)
def test_a_mix_of_everything(folders, expected, speculation, method):
    found = run(str(folders[0]), requests(), num_kv_blocks=TOO_FEW, speculative_config=speculation(method))
    check(found, expected())


def test_a_mix_with_trees(folders, expected, speculation):
    keys = {"kv_cache_dtype": "fp16"}
    found = run(str(folders[0]), requests(), num_kv_blocks=TOO_FEW, speculative_config=speculation("medusa"), **keys)
    check(found, expected(**keys))


@pytest.mark.slow
@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("method", METHODS)
def test_a_mix_over_ranks(folders, expected, speculation, method, cut):
    keys = {**CUTS[cut], "threads_per_replica": 2}
    found = run(str(folders[0]), requests(), num_kv_blocks=TOO_FEW, speculative_config=speculation(method), **keys)
    check(found, expected(**keys))


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("method", ["ngram", "draft_model", "layer_skip"])
def test_a_mix_on_smollm2(expected_smollm2, method):
    own = {"draft_model": {"model": "smollm2"}, "layer_skip": {"num_layers": 24, "num_speculative_tokens": 4}}
    config = {**METHODS[method], **own.get(method, {}), "adaptive": False, "verification": "coupled"}
    found = run("smollm2", requests(), num_kv_blocks=TOO_FEW, max_model_len=256, speculative_config=config)
    assert_equal(found.answers, expected_smollm2, requests())
    assert found.restarts and found.accepted > 20


@pytest.fixture(scope="module")
def expected_smollm2() -> list[Answer]:
    try:
        resolve_model("smollm2")
    except ModelLoadError as error:
        pytest.skip(str(error))
    return run("smollm2", requests(), num_kv_blocks=PLENTY, max_model_len=256).answers
