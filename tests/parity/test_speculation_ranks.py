"""Drafts in gangs: every method gives, over every cut, the tokens that one process gives without drafts."""

from pathlib import Path

import pytest
import torch
import transformers

from warmroot.cluster.speculative_config import SpeculativeConfig
from warmroot.cluster.topology import Topology

from .conftest import Family
from .sharded_gang import ROUNDING, Outcome, assert_equal, load, served_by_gang, served_by_one

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
def small_folder(folder, tmp_path_factory):
    """A drafting model: the one of this name without its last layer."""

    def get(name: str) -> Path:
        model = transformers.AutoModelForCausalLM.from_pretrained(folder(name), dtype=torch.float32)
        model.model.layers = model.model.layers[:-1]
        model.config.num_hidden_layers -= 1
        path = tmp_path_factory.mktemp("small")
        model.save_pretrained(path)
        return path

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
def test_a_gang_with_drafts_gives_what_one_process_gives_without(folder, small_folder, expected, model, cut, method):
    """Too few pages, chunks, cached prefixes, and clients that leave meanwhile."""
    options = {"speculation": METHODS[method], "draft_path": small_folder(model) if method == "draft_model" else None}
    with served_by_gang(folder(model), CUTS[model][cut], 27, **options) as served:
        assert_equal(served.run(load()), expected(model), atol=ROUNDING)
        assert served.executor.num_restarts
        assert_equal(served.run(load()), expected(model), atol=ROUNDING)
        counts = served.engine.load()
        assert counts.num_draft_tokens > 20
        # Random tokens hardly ever repeat themselves.
        assert method == "ngram" or sum(counts.accepted_by_place) > 20
