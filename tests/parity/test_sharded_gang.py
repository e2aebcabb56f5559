"""A whole engine over a gang of processes gives every request what one process gives it.

The one process has pages for all and computes every prompt at once. The gang has too few pages, and a step has room for
16 tokens: prompts come in chunks and out of the cache, sequences are preempted, and clients leave in between.
"""

from pathlib import Path

import pytest

from warmroot.actors.kernels.library import native
from warmroot.actors.models.spec import read_spec
from warmroot.cluster.kv_layout import KvLayout
from warmroot.cluster.topology import Topology

from .conftest import FAMILIES, Family
from .sharded_gang import BLOCK_SIZE, ROUNDING, Outcome, assert_equal, load, served_by_gang, served_by_one
from .sparse_families import FAMILIES as SPARSE

HEADS_9_3 = {
    "hidden_size": 72,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 16,
    "vocab_size": 131,
    "tie_word_embeddings": True,
}
ODD = {
    "llama-9-3": Family("LlamaForCausalLM", HEADS_9_3),
    "qwen3-windows": Family(
        "Qwen3ForCausalLM",
        HEADS_9_3
        | {
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "tie_word_embeddings": False,
            "use_sliding_window": True,
            "sliding_window": 6,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "sliding_attention"],
        },
    ),
}
CUTS = {
    "tp2": Topology(tp=2),
    "tp3": Topology(tp=3),
    "tp4": Topology(tp=4),
    "pp2": Topology(pp=2),
    "pp3": Topology(pp=3),
    "pp4": Topology(pp=4),
    "tp2-pp2": Topology(tp=2, pp=2),
    "tp2-pp3": Topology(tp=2, pp=3),
    "tp2-ep2": Topology(tp=2, ep=2),
    "tp4-ep2": Topology(tp=4, ep=2),
    "tp2-pp2-ep2": Topology(tp=2, pp=2, ep=2),
    "ep2": Topology(ep=2),
    "ep4": Topology(ep=4),
    "tp2-ep4": Topology(tp=2, ep=4),
    "pp2-ep2": Topology(pp=2, ep=2),
}
QUICK = {
    ("llama", "tp3"),
    ("llama-9-3", "tp2"),
    ("llama-9-3", "tp3"),
    ("llama-llama3-rope", "tp2-pp2"),
    ("llama-yarn-rope", "tp2"),
    ("llama-linear-rope", "tp4"),
    ("llama-dynamic-rope", "pp3"),
    ("mistral", "tp2-pp2"),
    ("qwen2", "pp2"),
    ("qwen3", "tp2"),
    ("qwen3-windows", "pp4"),
    ("gemma2", "tp2-pp2"),
    ("gemma3", "pp4"),
    ("mixtral", "ep2"),
    ("mixtral", "tp2-pp2-ep2"),
    ("qwen2_moe", "ep4"),
    ("qwen2_moe", "tp2-ep2"),
    ("qwen3_moe", "pp2-ep2"),
    ("olmoe", "tp2-ep2"),
    ("olmoe", "ep2"),
    ("deepseek_v2", "tp2-ep2"),
    ("deepseek_v3", "pp2-ep2"),
}
"""What runs every time; the rest of the matrix is slow only by its number."""
MODELS = FAMILIES | ODD | SPARSE


def cells() -> list:
    dense = [(model, cut) for model in FAMILIES | ODD for cut in CUTS if "ep" not in cut and _fits(model, CUTS[cut].tp)]
    sparse = [(model, cut) for model in SPARSE for cut in CUTS if _fits(model, CUTS[cut].tp)]
    assert {*dense, *sparse} >= QUICK
    return [
        pytest.param(*cell, id="-".join(cell), marks=() if cell in QUICK else pytest.mark.slow)
        for cell in dense + sparse
    ]


def _fits(model: str, tp: int) -> bool:
    config = MODELS[model].config
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    return tp <= kv_heads or (tp % kv_heads == 0 and heads % tp == 0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The folder of a model, by its name."""
    found: dict[str, Path] = {}

    def get(model: str) -> Path:
        if model not in found:
            found[model] = tmp_path_factory.mktemp(model)
            MODELS[model].build().save_pretrained(found[model])
        return found[model]

    return get


@pytest.fixture(scope="module")
def expected(folder):
    """What one process gives a load, by the name of the model."""
    found: dict[str, dict[str, Outcome]] = {}

    def get(model: str) -> dict[str, Outcome]:
        if model not in found:
            found[model] = served_by_one(folder(model)).run(load())
        return found[model]

    return get


def few_blocks(path: Path) -> int:
    """Enough for the longest sequence, and not for eight."""
    windows = [group.window for group in KvLayout.of(read_spec(path).layer_windows, BLOCK_SIZE).groups]
    return 1 + sum(24 if window is None else window + (8 if len(windows) == 1 else 4) for window in windows)


@pytest.mark.parametrize(("model", "cut"), cells())
def test_a_gang_gives_what_one_process_gives(folder, expected, model, cut):
    path, topology = folder(model), CUTS[cut]
    with served_by_gang(path, topology, few_blocks(path), num_redundant_experts=4 if "ep" in cut else 0) as served:
        first, watched = served.run(load()), served.executor
        assert_equal(first, expected(model), atol=_rounding(topology.stage_size > 1))
        assert watched.num_restarts
        assert watched.num_chunks
        assert watched.most_in_flight == topology.pp
        assert any(outcome.cached for outcome in first.values())
        # Experts move between ranks while they serve, and with them the order of sums.
        assert_equal(served.run(load()), first, atol=_rounding("ep" in cut))


def _rounding(sums_differ: bool) -> float:
    """Native kernels give a row the same bits whatever else is computed."""
    return ROUNDING if sums_differ or native() is None else 0.0
