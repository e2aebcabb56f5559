"""What each rank holds, against numbers worked out by hand and against the whole model."""

from collections import Counter
from dataclasses import replace
from itertools import combinations, pairwise, product
from math import prod

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from layout_models import LLAMA_70B, MLA, MOE, SMOLLM2, SPECS, layout, model

from warmroot.cluster.errors import ConfigError
from warmroot.cluster.head_cuts import HeadCut
from warmroot.cluster.kv_formats import KV_FORMATS
from warmroot.cluster.model_spec import MoeSpec
from warmroot.cluster.model_tensors import EMBEDDING, FINAL_NORM, HEAD, dim_sizes
from warmroot.cluster.splits import split_by_cost, split_by_share, split_evenly
from warmroot.cluster.weight_formats import WEIGHT_FORMATS, KeptWeights

Q4_K, Q8_0 = WEIGHT_FORMATS["q4_k"], WEIGHT_FORMATS["q8_0"]


SIZES = [(1, 1, 1), (2, 1, 1), (1, 2, 1), (2, 2, 1), (8, 1, 1)]
MOE_SIZES = [(1, 1, 2), (1, 1, 4), (2, 1, 2), (4, 1, 2), (2, 2, 4)]
CASES = [
    (name, sizes, redundant)
    for name, spec in SPECS.items()
    for sizes, redundant in [(sizes, 0) for sizes in SIZES]
    + ([(sizes, redundant) for sizes, redundant in product(MOE_SIZES, (0, 4))] if spec.moe else [])
]


@pytest.mark.parametrize(("name", "sizes", "redundant"), CASES)
def test_every_weight_is_held_as_often_as_the_groups_say(name, sizes, redundant):
    """Counts the holders of each tensor's elements by the parts' ends: parts of one tensor are equal or disjoint."""
    spec = SPECS[name]
    cut = layout(spec, *sizes, num_redundant_experts=redundant)
    topology, whole = cut.topology, dim_sizes(spec)
    held: dict[str, Counter[tuple[range, ...]]] = {}
    for rank in cut.ranks:
        for tensor, dims in rank.tensors().items():
            held.setdefault(tensor, Counter())[rank.part(dims)] += 1
            assert all(
                0 <= part.start < part.stop <= whole[dim] for dim, part in zip(dims, rank.part(dims), strict=True)
            )
    elements = 0
    dims_of = {tensor: dims for rank in cut.ranks for tensor, dims in rank.tensors().items()}
    for tensor, parts in held.items():
        size = prod(whole[dim] for dim in dims_of[tensor])
        assert sum(prod(map(len, part)) for part in parts) == size, tensor
        elements += size
        copies = topology.attention_dp * (2 if tensor == EMBEDDING and spec.tie_embeddings and topology.pp > 1 else 1)
        if ".experts." not in tensor:
            assert sum(parts.values()) == topology.tp * copies
    assert elements == spec.num_parameters
    if spec.moe is not None:
        experts = [name for name in held if ".experts." in name]
        slots = sum(sum(held[name].values()) for name in experts) / 3 / sum(spec.moe.sparse_layers)
        assert slots == (spec.moe.num_experts + redundant) * topology.expert_tp


def test_one_rank_holds_the_model():
    for spec in SPECS.values():
        assert layout(spec).ranks[0].num_parameters == spec.num_parameters


def test_llama_70b_in_four_by_two():
    cut = layout(LLAMA_70B, tp=4, pp=2)
    rank = cut.ranks[5]
    assert (rank.place.stage, rank.place.tp_rank, rank.layers) == (1, 1, range(41, 80))
    assert rank.heads == HeadCut(range(16, 32), range(2, 4))
    assert rank.cuts["inner"] == range(7168, 14336)
    assert rank.cuts["vocab"] == range(32064, 64128)
    per_layer = 8192 * (2 * 2048 + 2 * 256) + 3 * 8192 * 7168 + 2 * 8192
    assert rank.num_parameters == 39 * per_layer + 32064 * 8192 + 8192
    assert cut.ranks[0].num_parameters == 41 * per_layer + 32064 * 8192
    assert rank.kv_token_bytes(KV_FORMATS["bf16"]) == 39 * 2 * 2 * 128 * 2


def test_kv_heads_are_shared_when_ranks_are_more():
    cut = layout(LLAMA_70B, tp=16)
    assert [rank.heads for rank in cut.ranks[2:4]] == [
        HeadCut(range(8, 12), range(1, 2), 2),
        HeadCut(range(12, 16), range(1, 2), 2),
    ]
    assert cut.ranks[3].cuts["keys"] == range(128, 256)
    assert cut.ranks[0].kv_token_bytes(KV_FORMATS["fp16"]) == 80 * 2 * 128 * 2


def test_uneven_heads_are_made_up_for_in_the_mlp():
    """SmolLM2 has three KV heads: of two ranks the one with two of them has less of the MLP."""
    first, second = layout(SMOLLM2, tp=2).ranks
    assert (first.heads, second.heads) == (HeadCut(range(6), range(2)), HeadCut(range(6, 9), range(2, 3)))
    assert (first.cuts["inner"], second.cuts["inner"]) == (range(608), range(608, 1536))
    # What the second one has less of are keys and values to read.
    assert first.num_parameters / second.num_parameters == pytest.approx(0.9, abs=0.02)
    assert layout(SMOLLM2, tp=3).ranks[1].cuts["inner"] == range(512, 1024)


def test_stages_balance_what_a_step_reads_or_what_is_held():
    """SmolLM2's head has as many weights as eight layers, but they read keys and values besides."""
    assert [len(stage) for stage in layout(SMOLLM2, pp=2).stages] == [18, 12]
    assert [len(stage) for stage in layout(SMOLLM2, pp=2, balance="memory").stages] == [15, 15]
    assert [len(stage) for stage in layout(SMOLLM2, pp=3).stages] == [12, 12, 6]


def test_stages_count_experts_by_what_a_rank_has_of_them():
    """A dense layer and three sparse ones, without tables to speak of: more ranks for experts, lighter layers."""
    moe = MoeSpec(num_experts=64, experts_per_token=1, intermediate_size=96, sparse_layers=(False,) * 6 + (True,) * 3)
    spec = model(architecture="olmoe", num_layers=9, vocab_size=1, moe=moe)
    assert [len(stage) for stage in layout(spec, pp=3, balance="memory").stages] == [7, 1, 1]
    assert [len(stage) for stage in layout(spec, pp=3, ep=64, balance="memory").stages] == [3, 3, 3]
    # All layers read as many keys and values, which weigh more than so small weights.
    assert [len(stage) for stage in layout(spec, pp=3, balance="work").stages] == [4, 3, 2]


def test_both_ends_of_a_tied_model_hold_the_table():
    first, last = layout(SPECS["tied"], pp=2).ranks
    assert EMBEDDING in first.tensors()
    assert EMBEDDING in last.tensors()
    assert HEAD not in last.tensors()
    assert (FINAL_NORM in first.tensors(), FINAL_NORM in last.tensors()) == (False, True)


def test_mla_caches_one_latent_on_every_rank():
    cut = layout(MLA, tp=4)
    assert [rank.kv_token_bytes(KV_FORMATS["bf16"]) for rank in cut.ranks] == [4 * 40 * 2] * 4
    assert cut.ranks[1].cuts["kv_expanded"] == range(2 * 28, 4 * 28)
    assert cut.ranks[1].cuts["heads_out"] == range(2 * 12, 4 * 12)
    assert cut.ranks[1].cuts["kv_latent"] == range(40)


def test_experts_and_their_parts():
    cut = layout(MOE, tp=4, ep=2)
    assert [rank.experts for rank in cut.ranks] == [(0, 1, 2, 3)] * 2 + [(4, 5, 6, 7)] * 2
    assert [rank.cuts["expert_inner"] for rank in cut.ranks] == [range(32), range(32, 64)] * 2
    assert [rank.cuts["shared_inner"].stop for rank in cut.ranks] == [24, 48, 72, 96]
    spread = layout(MOE, tp=2, ep=4, num_redundant_experts=4)
    assert [rank.experts for rank in spread.ranks] == [(0, 1, 2), (3, 4, 5), (6, 7, 0), (1, 2, 3)]
    assert spread.ranks[3].cuts["expert_inner"] == range(64)


def test_bytes_of_packed_weights():
    """Panels of 16 rows, 20 bytes for 32 weights with a minimum, 34 for those of 8 bits; norms are float32."""
    spec = model(hidden_size=256, intermediate_size=512, num_heads=4, num_kv_heads=2, head_dim=128, num_layers=1)
    rank = layout(spec, tp=2, weights=Q4_K).ranks[0]
    linears = 256 + 2 * 128 + 256 + 3 * 256  # rows of 256 columns
    table, head, norms = 50 * 512, 64 * (8 * 34), 3 * 256 * 4  # 50 rows fill four panels
    kept = KeptWeights.packed("float16", dict.fromkeys(rank.tensors(), "q4_k") | {HEAD: "q6_k"})
    assert kept.name == "q4_k+q6_k"
    assert rank.weight_bytes(kept) == linears * 8 * 20 + table + head + norms
    floats = KeptWeights.packed("float32")
    assert rank.weight_bytes(floats) == (linears + 50 + 64) * 1024 + norms
    assert rank.weight_bytes(KeptWeights.plain("bfloat16")) == (linears + 50 + 50) * 512 + norms


def test_a_tied_head_is_a_copy_only_where_it_is_packed():
    table, norms = 100 * 64, 9 * 64
    whole, (first, last) = layout(SPECS["tied"]).ranks[0], layout(SPECS["tied"], pp=2).ranks
    gpu, cpu = KeptWeights.plain("float16"), KeptWeights.packed("float16")
    assert whole.weight_bytes(gpu) == 2 * whole.num_parameters + 2 * norms
    assert whole.weight_bytes(cpu) - whole.weight_bytes(gpu) == 112 * 64 * 2  # seven panels
    assert first.weight_bytes(gpu) + last.weight_bytes(gpu) - whole.weight_bytes(gpu) == 2 * table
    assert first.weight_bytes(cpu) + last.weight_bytes(cpu) == whole.weight_bytes(cpu)


def test_gates_are_exact_and_summed_biases_are_on_one_rank():
    rank = layout(MOE).ranks[0]
    gates, norms, biases = 3 * (8 + 1) * 64, 9 * 64, 4 * (64 + 2 * 32)
    exact = gates + norms + biases
    assert rank.weight_bytes(KeptWeights.plain("float16")) == 2 * (rank.num_parameters - exact) + 4 * exact
    biased = layout(replace(SPECS["dense"], o_bias=True), tp=2)
    plain = layout(SPECS["dense"], tp=2)
    added = [
        one.weight_bytes(KeptWeights.plain("float16")) - other.weight_bytes(KeptWeights.plain("float16"))
        for one, other in zip(biased.ranks, plain.ranks, strict=True)
    ]
    assert added == [4 * 64 * 4, 0]


def test_formats_are_those_of_gguf():
    assert Q8_0.matrix_bytes(3, 64) == 3 * 2 * 34
    assert Q4_K.matrix_bytes(2, 512) == 2 * 2 * 144
    assert WEIGHT_FORMATS["q6_k"].matrix_bytes(1, 256) == 210
    assert WEIGHT_FORMATS["q5_0"].matrix_bytes(1, 32) == 22


@pytest.mark.parametrize(
    ("spec", "sizes", "options", "key", "words"),
    [
        (SMOLLM2, (4, 1, 1), {}, "tensor_parallel_size", r"4 ranks cannot share .* 9 .* 3 KV heads; 1, 2, 3, 9 fit"),
        (LLAMA_70B, (24, 1, 1), {}, "tensor_parallel_size", r"1, 2, 3, 4, 5, 6, 7, 8, 16, 32, 64 fit"),
        (SMOLLM2, (2, 1, 1), {"weights": Q4_K}, "tensor_parallel_size", r"in groups of 256 columns; 1 fits"),
        (model(intermediate_size=6), (8, 1, 1), {}, "tensor_parallel_size", r"MLP of 6 columns has no 8 parts.*6 fit"),
        (replace(MOE, head_dim=32), (4, 1, 1), {"weights": Q8_0}, "tensor_parallel_size", r"MLP of 96 .*at most 3 fit"),
        (model(), (1, 5, 1), {}, "pipeline_parallel_size", r"5 stages are more than the model's 4 layers"),
        (model(), (1, 1, 2), {}, "expert_parallel_size", r"llama\) has no experts"),
        (model(), (1, 1, 1), {"num_redundant_experts": 1}, "num_redundant_experts", r"no experts"),
        (MOE, (3, 1, 3), {}, "expert_parallel_size", r"8 experts; 1, 2, 4, 8 do, or set num_redundant_experts to 1"),
    ],
)
def test_what_cannot_be_cut_is_refused_with_what_fits(spec, sizes, options, key, words):
    with pytest.raises(ConfigError, match=words) as refused:
        layout(spec, *sizes, **options)
    assert refused.value.param == key
    assert refused.value.message.startswith(f"{key}: ")


def test_sizes_said_to_fit_do_fit():
    for tp in (1, 2, 3, 9):
        layout(SMOLLM2, tp=tp)
    for tp in (1, 2, 3, 4, 5, 6, 7, 8, 16, 32, 64):
        layout(LLAMA_70B, tp=tp)


def test_odd_mlp_sizes_are_cut_where_they_can_be():
    assert [len(rank.cuts["inner"]) for rank in layout(model(intermediate_size=50), tp=4).ranks] == [13, 13, 12, 12]
    assert [len(rank.cuts["inner"]) for rank in layout(model(intermediate_size=96), tp=2).ranks] == [64, 32]


def test_splits():
    assert split_evenly(7, 3) == [range(3), range(3, 5), range(5, 7)]
    assert split_by_share(12, [1, 2, 3], 2) == [range(2), range(2, 6), range(6, 12)]
    assert split_by_share(3, [0, 100, 0]) == [range(1), range(1, 2), range(2, 3)]


@settings(deadline=None)
@given(
    st.lists(st.integers(1, 20), min_size=1, max_size=8),
    st.integers(1, 8),
    st.integers(0, 30),
    st.integers(0, 30),
)
def test_no_split_has_a_cheaper_costliest_part(costs, parts, first, last):
    parts = min(parts, len(costs))

    def peak(ends):
        totals = [sum(costs[begin:end]) for begin, end in zip((0, *ends), (*ends, len(costs)), strict=True)]
        totals[0] += first
        totals[-1] += last
        return max(totals)

    found = split_by_cost(costs, parts, first, last)
    assert [found[0].start, found[-1].stop] == [0, len(costs)]
    assert all(before.stop == after.start and after for before, after in pairwise(found))
    cuts = combinations(range(1, len(costs)), parts - 1)
    assert peak([part.stop for part in found[:-1]]) == min(map(peak, cuts))


def test_spec_changes_reach_the_layout():
    biased = replace(SPECS["dense"], qkv_bias=True, o_bias=True, mlp_bias=True)
    added = layout(biased, tp=2).ranks[1].num_parameters - layout(SPECS["dense"], tp=2).ranks[1].num_parameters
    inner = len(layout(biased, tp=2).ranks[1].cuts["inner"])
    assert added == 4 * (32 + 2 * 16 + 64 + 2 * inner + 64)
