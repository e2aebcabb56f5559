"""The capacity plan against numbers worked out by hand."""

from dataclasses import replace

import pytest
from layout_models import MOE

from warmroot.cluster.capacity import CapacityPlan, DraftNeeds, Needs, plan_capacity, smallest_fit
from warmroot.cluster.errors import ConfigError
from warmroot.cluster.kv_formats import KV_FORMATS, kv_format
from warmroot.cluster.model_spec import ModelSpec, RopeSpec
from warmroot.cluster.parallel_layout import ParallelLayout
from warmroot.cluster.topology import Topology
from warmroot.cluster.weight_formats import KeptWeights

GB, GIB = 10**9, 2**30
HALVES = KeptWeights.plain("float16")


def llama(layers: int, hidden: int, inter: int, heads: int, kv: int, vocab: int, context: int, **other) -> ModelSpec:
    values = {
        "architecture": "llama",
        "head_dim": hidden // heads,
        "norm_eps": 1e-5,
        "rope": RopeSpec(rotary_dim=hidden // heads),
        "layer_windows": (None,) * layers,
        "tie_embeddings": False,
        "query_scale": (hidden // heads) ** -0.5,
    }
    return ModelSpec(
        num_layers=layers,
        hidden_size=hidden,
        intermediate_size=inter,
        num_heads=heads,
        num_kv_heads=kv,
        vocab_size=vocab,
        max_position=context,
        **(values | other),
    )


LLAMA_2_70B = llama(80, 8192, 28672, 64, 8, 32000, 4096)
SMOLLM2_135M = llama(30, 576, 1536, 9, 3, 49152, 8192, tie_embeddings=True)
MISTRAL_7B = llama(32, 4096, 14336, 32, 8, 32000, 32768, architecture="mistral", layer_windows=(4096,) * 32)
GEMMA_3_1B = llama(
    26,
    1152,
    6912,
    4,
    1,
    262144,
    32768,
    architecture="gemma3",
    head_dim=256,
    tie_embeddings=True,
    qk_norm=True,
    sandwich_norms=True,
    layer_windows=tuple(None if layer % 6 == 5 else 512 for layer in range(26)),
)


def needs(spec: ModelSpec, memory: int = 80 * GB, fmt: str = "fp16", weights: KeptWeights = HALVES) -> Needs:
    return Needs(
        memory_bytes=memory, weights=weights, kv_format=KV_FORMATS[fmt], max_model_len=spec.max_position, block_size=16
    )


def plan(spec: ModelSpec, memory: int = 80 * GB, *, tp: int = 1, pp: int = 1, ep: int = 1, **options) -> CapacityPlan:
    return plan_capacity(ParallelLayout.of(spec, Topology(tp=tp, pp=pp, ep=ep)), needs(spec, memory, **options))


def sequence_bytes(spec: ModelSpec, length: int) -> int:
    cut = plan_capacity(ParallelLayout.of(spec, Topology()), replace(needs(spec), max_model_len=length))
    return cut.sequence_bytes(cut.ranks[0])


def test_llama_2_70b_sequence_costs_1_34_gb_and_not_160():
    assert sequence_bytes(LLAMA_2_70B, 4096) == 2 * 80 * 4096 * 8 * 128 * 2 == 1_342_177_280
    without_gqa = replace(LLAMA_2_70B, num_kv_heads=64)
    assert sequence_bytes(without_gqa, 4096) == 2 * 80 * 4096 * 64 * 128 * 2 == 10_737_418_240


def test_llama_2_70b_bytes_per_token():
    assert plan(LLAMA_2_70B).kv_token_bytes == 80 * 4096 == 327_680


def test_known_parameter_counts():
    assert LLAMA_2_70B.num_parameters == 68_976_648_192
    assert SMOLLM2_135M.num_parameters == 134_515_008
    assert MISTRAL_7B.num_parameters == 7_241_732_096
    assert GEMMA_3_1B.num_parameters == 999_885_952


def test_kv_heads_are_split_and_then_replicated():
    assert {rank.kv_token_bytes for rank in plan(LLAMA_2_70B, tp=8).ranks} == {327_680 / 8}
    assert {rank.kv_token_bytes for rank in plan(LLAMA_2_70B, tp=16).ranks} == {327_680 / 8}
    assert plan(LLAMA_2_70B, tp=8).kv_token_bytes == 327_680
    assert plan(LLAMA_2_70B, tp=16).kv_token_bytes == 2 * 327_680
    assert plan(LLAMA_2_70B, tp=2, pp=4).kv_token_bytes == 327_680


def test_windows_bound_a_sequence():
    # 4096 tokens of window may start inside a block: 257 blocks of 16.
    assert sequence_bytes(MISTRAL_7B, 32768) == 257 * 16 * 32 * 4096
    assert sequence_bytes(MISTRAL_7B, 1024) == 1024 * 32 * 4096


def test_gemma_pays_for_global_layers_only():
    gemma = plan(GEMMA_3_1B)
    assert [len(group.layers) for group in gemma.pages.groups] == [4, 4, 4, 4, 4, 2, 4]
    layer_page = 16 * 2 * 1 * 256 * 2
    assert gemma.tightest.page_bytes == 4 * layer_page
    assert gemma.pages.sequence_blocks(32768) == 6 * 33 + 2048
    assert sequence_bytes(GEMMA_3_1B, 32768) < 0.2 * 26 * 2048 * layer_page


def test_stages_share_the_groups_of_the_whole_model():
    """A stage's pages have room for as many layers as its largest group has there."""
    gemma = plan(GEMMA_3_1B, pp=4)
    held = [[len(group.layers) for group in gemma.pages.stage(rank.layout.layers).groups] for rank in gemma.ranks]
    assert held[0] == [4, 4, 0, 0, 0, 0, 1]
    assert [rank.page_bytes for rank in gemma.ranks] == [max(layers) * 16 * 2 * 256 * 2 for layers in held]
    assert gemma.pages == plan(GEMMA_3_1B).pages


def test_bytes_per_head_and_token_in_every_format():
    per_token = {name: fmt.token_bytes(128, 16) for name, fmt in KV_FORMATS.items()}
    assert per_token == {
        "fp32": 1024,
        "fp16": 512,
        "bf16": 512,
        "fp8": 2 * (128 + 2),
        "int8": 128 + (128 * 2 + 8) / 16 + 128 + 3,
        "int4": 64 + (128 * 2 + 8) / 16 + 64 + 3,
        "k8v4": 128 + (128 * 2 + 8) / 16 + 64 + 3,
    }


def test_int4_groups_hold_at_most_128_elements():
    assert KV_FORMATS["int4"].value.page_bytes(64, 1) == 32 + 3
    assert KV_FORMATS["int4"].value.page_bytes(192, 1) == 96 + 2 * 3


def test_quantised_formats_keep_their_bars():
    """Of 16 bits, scales and all, at the smallest heads in use."""
    share = {name: fmt.token_bytes(64, 16) / KV_FORMATS["fp16"].token_bytes(64, 16) for name, fmt in KV_FORMATS.items()}
    assert share["fp8"] <= share["int8"] <= 0.55 and share["k8v4"] <= 0.42 and share["int4"] <= 0.32


def test_auto_follows_the_weights():
    assert kv_format("auto", "bfloat16").name == "bf16"
    assert kv_format("int8", "bfloat16").name == "int8"
    with pytest.raises(ConfigError, match="'fp4' is not one of auto, fp32"):
        kv_format("fp4", "float16")


def test_blocks_and_sequences_of_a_budget():
    floats = plan(SMOLLM2_135M, 2 * GIB, fmt="fp32", weights=KeptWeights.plain("float32"))
    (rank,) = floats.ranks
    assert rank.weight_bytes == 538_060_032
    assert rank.page_bytes == 16 * 30 * 2 * 3 * 64 * 4
    assert floats.num_blocks == (2 * GIB - 538_060_032) // rank.page_bytes
    assert floats.max_sequences == (floats.num_blocks - 1) // 512
    assert (floats.limit, floats.missing_bytes) == (None, 0)


def test_weights_that_do_not_fit():
    whole = plan(LLAMA_2_70B)
    norms = (80 * 2 + 1) * 8192  # float32
    assert whole.limit == "weights"
    assert whole.num_blocks == whole.max_sequences == whole.max_cached_tokens == 0
    page = whole.tightest.page_bytes
    assert whole.missing_bytes == 2 * (68_976_648_192 + norms) + 1_342_177_280 + page - 80 * GB


def test_a_sequence_that_does_not_fit():
    weights, page = plan(SMOLLM2_135M).ranks[0].weight_bytes, plan(SMOLLM2_135M).ranks[0].page_bytes
    short = plan(SMOLLM2_135M, weights + 101 * page)
    assert short.limit == "sequence"
    assert short.max_cached_tokens == 1600
    assert short.missing_bytes == (512 + 1 - 101) * page
    enough = plan(SMOLLM2_135M, weights + 513 * page)
    assert (enough.limit, enough.missing_bytes, enough.max_sequences) == (None, 0, 1)


def test_the_rank_with_the_fewest_pages_decides():
    """Of SmolLM2's three KV heads the first rank has two, and of its layers the first stage has 18."""
    cut = plan(SMOLLM2_135M, GIB, tp=2, pp=2)
    assert [rank.page_bytes for rank in cut.ranks] == [
        layers * heads * 16 * 2 * 64 * 2 for layers, heads in ((18, 2), (18, 1), (12, 2), (12, 1))
    ]
    assert cut.tightest is cut.ranks[0]
    assert cut.num_blocks == min(rank.num_blocks for rank in cut.ranks) < cut.ranks[1].num_blocks


def test_groups_with_requests_of_their_own_add_up():
    one, four = plan(MOE, 10**7, tp=2), plan(MOE, 10**7, tp=2, ep=8)
    each = (four.num_blocks - 1) // four.pages.sequence_blocks(128)
    assert four.max_sequences == 4 * each
    assert four.kv_token_bytes == one.kv_token_bytes == 4 * 2 * 4 * 8 * 2


def test_smallest_fit():
    def fit(memory: int) -> Topology | None:
        return smallest_fit(LLAMA_2_70B, needs(LLAMA_2_70B, memory))

    assert fit(80 * GB) == Topology(tp=2)
    assert fit(24 * GB) == Topology(tp=6)  # two KV heads on two ranks, one on the others
    assert fit(20 * GB) == Topology(tp=7)  # the rank with two KV heads has less of the MLP
    assert fit(10 * GB) == Topology(tp=7, pp=2)
    assert fit(GB) is None


def test_smallest_fit_takes_only_what_can_be_cut():
    """SmolLM2's nine heads go over 1, 2, 3 or 9 ranks."""
    weights = plan(SMOLLM2_135M).ranks[0].weight_bytes
    found = smallest_fit(SMOLLM2_135M, needs(SMOLLM2_135M, weights // 3))
    assert found is not None
    assert found.tp in (1, 2, 3)
    assert found.world_size >= 4


def test_experts_stay_whole_where_their_number_allows():
    def fit(share: float) -> Topology | None:
        return smallest_fit(MOE, needs(MOE, int(share * whole)))

    whole = plan(MOE, 10**9).ranks[0].weight_bytes + 9 * plan(MOE).ranks[0].page_bytes
    assert fit(1.0) == Topology()
    assert fit(0.6) == Topology(tp=2, ep=2)


def test_impossible_lengths():
    with pytest.raises(ConfigError, match="max_model_len: 5000 is not between 1 and the model's context of 4096"):
        plan_capacity(ParallelLayout.of(LLAMA_2_70B, Topology()), replace(needs(LLAMA_2_70B), max_model_len=5000))


DRAFT = llama(4, 256, 512, 4, 2, 49152, 8192, tie_embeddings=True)


def test_a_drafting_model_takes_weights_and_pages_where_tokens_are_sampled():
    draft = DraftNeeds.of_model(DRAFT, HALVES, KV_FORMATS["fp16"], 16)
    assert draft == DraftNeeds(weight_bytes=draft.weight_bytes, page_bytes=4 * 16 * 2 * 2 * 64 * 2)
    # Norms are float32.
    assert draft.weight_bytes == 2 * DRAFT.num_parameters + 2 * (2 * 4 + 1) * 256
    layout = ParallelLayout.of(SMOLLM2_135M, Topology(tp=3, pp=2))
    alone, beside = (plan_capacity(layout, replace(needs(SMOLLM2_135M, GB), draft=one)) for one in (None, draft))
    for rank, before in zip(beside.ranks, alone.ranks, strict=True):
        is_sampling = rank.layout.place.rank == 3
        assert rank.layout.samples == is_sampling
        assert before.kv_bytes - rank.kv_bytes == rank.draft_weight_bytes == is_sampling * draft.weight_bytes
        assert rank.page_bytes - before.page_bytes == is_sampling * draft.page_bytes
    assert beside.tightest.layout.place.rank == 3 and beside.num_blocks < alone.num_blocks


def test_a_drafting_models_pages_are_never_quantised():
    assert DraftNeeds.of_model(DRAFT, HALVES, KV_FORMATS["int4"], 16) == DraftNeeds.of_model(
        DRAFT, HALVES, KV_FORMATS["fp16"], 16
    )


def test_open_pages_are_planned_beside_quantised_ones():
    quantised = plan(SMOLLM2_135M, GB, fmt="int8")
    (rank,) = quantised.ranks
    # Keys in 16 bits: two for each of 256 sequences and 32, those that a step of 2,048 tokens writes, and a quarter.
    assert rank.open_page_bytes == 30 * 3 * 2 * 64 * 16
    assert rank.open_pages == int(1.25 * (2 * 256 + 256 + 2048 // 16 + 32)) == 1160
    assert rank.num_blocks == (rank.kv_bytes - 1160 * rank.open_page_bytes) // rank.page_bytes
    assert rank.pages_bytes(rank.num_blocks) <= rank.kv_bytes < rank.pages_bytes(rank.num_blocks + 1)
    assert plan(SMOLLM2_135M, GB).ranks[0].open_page_bytes == 0


def test_where_pages_are_few_all_may_be_open():
    least = plan(SMOLLM2_135M, GB).ranks[0].weight_bytes
    (rank,) = plan(SMOLLM2_135M, least + 100 * 2**20, fmt="int4").ranks
    assert rank.num_blocks == 100 * 2**20 // (rank.page_bytes + rank.open_page_bytes) < rank.open_pages
