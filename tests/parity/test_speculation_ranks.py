"""Drafts in gangs: every method gives, over every cut, the tokens that one process gives without drafts."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
from medusa_harness import fitted_outputs, save_heads, texts_of

from warmroot.actors.runner.load import KvMemoryConfig, load_runner
from warmroot.cluster.errors import ConfigError
from warmroot.cluster.ids import RequestId
from warmroot.cluster.messages import GenerateRequest
from warmroot.cluster.sampling_params import SamplingParams
from warmroot.cluster.speculative_config import SpeculativeConfig
from warmroot.cluster.topology import Topology
from warmroot.router.tokenizer import Tokenizer

from .conftest import Family
from .sharded_gang import (
    BLOCK_SIZE,
    ROUNDING,
    Outcome,
    Served,
    assert_equal,
    load,
    random_tokens,
    served_by_gang,
    served_by_one,
)

LLAMA = Family("LlamaForCausalLM", {"num_attention_heads": 4, "num_key_value_heads": 2})
MIXTRAL = Family("MixtralForCausalLM", {"num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 8})
MODELS = {"dense": LLAMA, "experts": MIXTRAL}
CUTS = {
    "dense": {"tp2": Topology(tp=2), "pp2": Topology(pp=2), "tp2-pp2": Topology(tp=2, pp=2)},
    "experts": {
        "tp2-ep2": Topology(tp=2, ep=2),
        "ep2": Topology(ep=2),
        "tp2-ep4": Topology(tp=2, ep=4),
        "pp2-ep2": Topology(pp=2, ep=2),
    },
}
METHODS = {
    "ngram": SpeculativeConfig(method="ngram", prompt_lookup_min=1, num_speculative_tokens=4, adaptive=False),
    "draft_model": SpeculativeConfig(
        method="draft_model", model="small", num_speculative_tokens=3, adaptive=False, verification="coupled"
    ),
    "layer_skip": SpeculativeConfig(
        method="layer_skip", num_layers=3, num_speculative_tokens=3, adaptive=False, verification="coupled"
    ),
    "medusa": SpeculativeConfig(method="medusa", model="heads", num_speculative_tokens=6, adaptive=False),
}
"""Draws are coupled, so that they are the same, too."""
SLOW = {("experts", "tp2-ep4"), ("experts", "pp2-ep2"), ("dense", "tp2-pp2")}


def like_its_first_layers(model: transformers.PreTrainedModel) -> transformers.PreTrainedModel:
    """The last layer adds little, so that the ones before guess well."""
    for name, parameter in model.model.layers[-1].named_parameters():
        if "o_proj" in name or "down_proj" in name:
            parameter.data *= 0.1
    return model


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The folder of a model, by its name."""
    found: dict[str, Path] = {}

    def get(name: str) -> Path:
        if name not in found:
            found[name] = tmp_path_factory.mktemp(name)
            like_its_first_layers(MODELS[name].build()).save_pretrained(found[name])
        return found[name]

    return get


@pytest.fixture(scope="module")
def draft_path(folder, tmp_path_factory):
    """What a method drafts with for the model of a name: it without its last layer, or heads that are often right."""
    found: dict[tuple[str, str], Path] = {}

    def get(name: str, method: str) -> Path | None:
        if method in ("ngram", "layer_skip"):
            return None
        if (name, method) not in found:
            path = found[name, method] = tmp_path_factory.mktemp(f"{name}-{method}")
            model = transformers.AutoModelForCausalLM.from_pretrained(folder(name), dtype=torch.float32)
            if method == "medusa":
                save_heads(path, fitted_outputs(model, texts_of(model), 2))
            else:
                model.model.layers = model.model.layers[:-1]
                model.config.num_hidden_layers -= 1
                model.save_pretrained(path)
        return found[name, method]

    return get


@pytest.fixture(scope="module")
def expected(folder):
    """What one process gives a load, by the name of the model."""
    found: dict[str, dict[str, Outcome]] = {}

    def get(name: str) -> dict[str, Outcome]:
        if name not in found:
            found[name] = served_by_one(folder(name)).run(load())
        return found[name]

    return get


def cells() -> list:
    found = [(model, cut, method) for model, cuts in CUTS.items() for cut in cuts for method in METHODS]
    return [
        pytest.param(*cell, id="-".join(cell), marks=pytest.mark.slow if cell[:2] in SLOW else ()) for cell in found
    ]


@pytest.mark.parametrize(("model", "cut", "method"), cells())
def test_a_gang_with_drafts_gives_what_one_process_gives_without(folder, draft_path, expected, model, cut, method):
    """Too few pages, chunks, cached prefixes, and clients that leave meanwhile."""
    options = {"speculation": METHODS[method], "draft_path": draft_path(model, method)}
    with served_by_gang(folder(model), CUTS[model][cut], 27, **options) as served:
        assert_equal(served.run(load()), expected(model), atol=ROUNDING)
        assert served.executor.num_restarts
        assert_equal(served.run(load()), expected(model), atol=ROUNDING)
        counts = served.engine.load()
        assert counts.num_draft_tokens > 20
        # Random tokens hardly ever repeat themselves.
        assert method == "ngram" or sum(counts.accepted_by_place) > 5


def greedy(count: int, max_tokens: int) -> list[GenerateRequest]:
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    prompts = [random_tokens(index, 3 + index % 4) * (1 + index % 3) for index in range(count)]
    return [
        GenerateRequest(request_id=RequestId(f"r{index}"), prompt_token_ids=prompt, params=params)
        for index, prompt in enumerate(prompts)
    ]


@pytest.mark.parametrize("cut", ["tp2", "pp2"])
@pytest.mark.parametrize("method", METHODS)
def test_greedy_output_is_the_same_at_any_batch(folder, draft_path, method, cut):
    plain = served_by_one(folder("dense")).run(greedy(16, 30))
    options = {"speculation": METHODS[method], "draft_path": draft_path("dense", method)}
    options |= {"max_num_seqs": 16, "max_num_batched_tokens": 96}
    with served_by_gang(folder("dense"), CUTS["dense"][cut], 400, **options) as served:
        assert_equal(served.run(greedy(16, 30)), plain)
        alone = Served(served.executor.inner, max_num_seqs=1, speculation=METHODS[method])
        assert_equal(alone.run(greedy(3, 30)), {name: plain[name] for name in ("r0", "r1", "r2")})
        assert served.engine.load().num_draft_tokens > 50 and alone.engine.load().num_draft_tokens > 5


@pytest.mark.parametrize("cut", ["tp2", "pp2"])
@pytest.mark.parametrize("method", ["draft_model", "layer_skip"])
def test_guesses_are_tested_as_in_one_process(folder, draft_path, method, cut):
    """Draws, tests and guesses are by counters: where drafts begin at the same tokens, all come out the same."""
    speculation = METHODS[method].model_copy(update={"verification": "rejection"})
    path = draft_path("dense", method)
    runner = load_runner(
        folder("dense"),
        dtype="float32",
        quantization="none",
        kv=KvMemoryConfig(block_size=BLOCK_SIZE, num_kv_blocks=400),
        speculation=speculation,
        draft_path=path,
    )
    asked = [
        replace(one, params=replace(one.params, temperature=0.8, top_p=0.9, seed=index))
        for index, one in enumerate(greedy(12, 30))
    ]
    options = {"speculation": speculation, "max_num_seqs": 16, "max_num_batched_tokens": 400}
    one_process = Served(runner, clients_leave=False, **options)
    expected = one_process.run(asked)
    accepted = one_process.engine.load().accepted_by_place
    with served_by_gang(folder("dense"), CUTS["dense"][cut], 400, draft_path=path, **options) as served:
        assert_equal(served.run(asked), expected)
        assert served.engine.load().accepted_by_place == accepted
    assert sum(accepted) < one_process.engine.load().num_draft_tokens


def test_typical_acceptance_in_a_gang(folder, draft_path):
    """Lossy: more stands than with the exact test."""
    counts: list[int] = []
    for threshold in (None, 0.3):
        speculation = METHODS["layer_skip"].model_copy(
            update={"verification": "rejection", "acceptance_threshold": threshold}
        )
        with served_by_gang(folder("dense"), Topology(tp=2), 400, speculation=speculation) as served:
            served.run([replace(one, params=replace(one.params, temperature=1.0, seed=7)) for one in greedy(8, 40)])
            load = served.engine.load()
            counts.append(sum(load.accepted_by_place) / load.num_draft_tokens)
    assert counts[1] > counts[0]


def test_the_rank_that_samples_has_fewest_pages(folder, draft_path):
    """Its share of the memory holds the pages of the drafting model, too."""
    page, memory = 4 * BLOCK_SIZE * 2 * 2 * 12 * 2, 1 << 20  # layers, tokens, keys and values, heads, elements, bytes
    cases = [
        # (two ranks, two layers and all heads each; a drafting model of three layers on the second)
        ("pp2", "draft_model", page // 2 + page * 3 // 4),
        ("pp2", "layer_skip", page // 2 + page * 3 // 4),
        ("tp2", "draft_model", page // 2 + page * 3 // 4),
        ("tp2", "layer_skip", page // 2),
        ("tp2", "ngram", page // 2),
    ]
    for cut, method, size in cases:
        options = {"speculation": METHODS[method], "draft_path": draft_path("dense", method)}
        memories = {"kv_cache_memory": memory, "kv_cache_dtype": "fp16"}
        with served_by_gang(folder("dense"), CUTS["dense"][cut], None, **memories, **options) as served:
            assert served.executor.num_blocks == memory // 2 // size


def test_what_cannot_draft_is_refused_by_name(folder):
    speculation = METHODS["layer_skip"].model_copy(update={"num_layers": 4})
    for cut in ("tp2", "pp2"):
        with (
            pytest.raises(ConfigError, match="num_layers must be less than the model's 4, got 4"),
            served_by_gang(folder("dense"), CUTS["dense"][cut], 60, speculation=speculation),
        ):
            pass


SMOLLM2_TEXTS = [
    "The capital of France is",
    "one two three four, one two three four, one two three four, one two",
    '{"name": "Ada", "age": 36}\n{"name": "Alan", "age": 41}\n{"name": "Grace", "age":',
    "def fibonacci(n):\n    ",
] * 4


@pytest.mark.model
@pytest.mark.slow
@pytest.mark.parametrize("cut", ["tp2", "pp2"])
def test_smollm2(smollm2_path, cut):
    tokenizer = Tokenizer.from_path(smollm2_path)
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    asked = [
        GenerateRequest(
            request_id=RequestId(f"r{index}"), prompt_token_ids=tokenizer.encode(text * (1 + index // 4)), params=params
        )
        for index, text in enumerate(SMOLLM2_TEXTS)
    ]
    options = {"block_size": 16, "max_num_seqs": 16, "max_num_batched_tokens": 512, "max_model_len": 512}
    with served_by_gang(smollm2_path, CUTS["dense"][cut], 600, **options) as served:
        plain = served.run(asked)
    for method, draft in (("ngram", None), ("layer_skip", None), ("draft_model", smollm2_path)):
        speculation = METHODS[method].model_copy(update={"num_layers": 20 if method == "layer_skip" else None})
        drafting = {"speculation": speculation, "draft_path": draft, **options}
        with served_by_gang(smollm2_path, CUTS["dense"][cut], 600, **drafting) as served:
            assert_equal(served.run(asked), plain, atol=2e-3)
            engine_options = {key: options[key] for key in options if key != "block_size"} | {"max_num_seqs": 1}
            alone = Served(served.executor.inner, speculation=speculation, **engine_options)
            assert_equal(alone.run(asked[1:3]), {name: plain[name] for name in ("r1", "r2")}, atol=2e-3)
            assert sum(served.engine.load().accepted_by_place) > 0
