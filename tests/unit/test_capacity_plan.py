"""The capacity plan against numbers worked out by hand."""

from dataclasses import replace

import pytest

from warmroot.cluster.capacity import KvCost, Shards, plan_capacity, rank_parameters, smallest_fit
from warmroot.cluster.errors import ConfigError
from warmroot.cluster.kv_formats import KV_FORMATS, kv_format
from warmroot.cluster.model_spec import ModelSpec, RopeSpec

GB, GIB = 10**9, 2**30
FP16 = KV_FORMATS["fp16"]


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


def cost(spec: ModelSpec, fmt: str = "fp16", shards: Shards | None = None, stage: int = 0) -> KvCost:
    return KvCost.of(spec, KV_FORMATS[fmt], 16, shards or Shards(), stage)


def test_llama_2_70b_sequence_costs_1_34_gb_and_not_160():
    assert cost(LLAMA_2_70B).sequence_bytes(4096) == 2 * 80 * 4096 * 8 * 128 * 2 == 1_342_177_280
    without_gqa = replace(LLAMA_2_70B, num_kv_heads=64)
    assert cost(without_gqa).sequence_bytes(4096) == 2 * 80 * 4096 * 64 * 128 * 2 == 10_737_418_240


def test_llama_2_70b_bytes_per_token():
    assert cost(LLAMA_2_70B).layer_token_bytes == 4096
    assert cost(LLAMA_2_70B).token_bytes == 327_680


def test_known_parameter_counts():
    assert LLAMA_2_70B.num_parameters == 68_976_648_192
    assert SMOLLM2_135M.num_parameters == 134_515_008
    assert MISTRAL_7B.num_parameters == 7_241_732_096
    assert GEMMA_3_1B.num_parameters == 999_885_952


@pytest.mark.parametrize("spec", [LLAMA_2_70B, SMOLLM2_135M, MISTRAL_7B, GEMMA_3_1B])
def test_one_rank_holds_the_whole_model(spec):
    assert rank_parameters(spec, Shards(), 0) == spec.num_parameters


def test_stages_hold_the_model_once():
    shards = Shards(pp=4)
    assert sum(rank_parameters(LLAMA_2_70B, shards, stage) for stage in range(4)) == LLAMA_2_70B.num_parameters
    extra_head = SMOLLM2_135M.vocab_size * SMOLLM2_135M.hidden_size
    tied = sum(rank_parameters(SMOLLM2_135M, shards, stage) for stage in range(4))
    assert tied == SMOLLM2_135M.num_parameters + extra_head


def test_tensor_parallel_ranks_share_all_but_norms():
    norms = (80 * 2 + 1) * 8192
    assert rank_parameters(LLAMA_2_70B, Shards(tp=8), 0) == (LLAMA_2_70B.num_parameters - norms) // 8 + norms


def test_uneven_stages():
    assert [len(stage) for stage in Shards(pp=4).stages(SMOLLM2_135M)] == [8, 8, 7, 7]
    assert Shards(pp=3).stages(LLAMA_2_70B) == [range(27), range(27, 54), range(54, 80)]


def test_kv_heads_are_split_and_then_replicated():
    assert cost(LLAMA_2_70B, shards=Shards(tp=8)).token_bytes == 327_680 / 8
    assert cost(LLAMA_2_70B, shards=Shards(tp=16)).token_bytes == 327_680 / 8
    assert cost(LLAMA_2_70B, shards=Shards(tp=2, pp=4)).token_bytes == 327_680 / 8
    plan = plan_capacity(LLAMA_2_70B, memory_bytes=80 * GB, dtype="float16", kv_format=FP16, shards=Shards(tp=16))
    assert plan.kv_token_bytes_all_devices == 2 * 327_680


def test_windows_bound_a_sequence():
    # 4096 tokens of window may start inside a block: 257 blocks of 16.
    assert cost(MISTRAL_7B).sequence_bytes(32768) == 257 * 16 * 32 * 4096
    assert cost(MISTRAL_7B).sequence_bytes(1024) == 1024 * 32 * 4096


def test_gemma_pays_for_global_layers_only():
    gemma = cost(GEMMA_3_1B)
    assert [len(group.layers) for group in gemma.layout.groups] == [4, 4, 4, 4, 4, 2, 4]
    layer_page = 16 * 2 * 1 * 256 * 2
    assert gemma.page_bytes == 4 * layer_page
    assert gemma.sequence_pages(32768) == 6 * 33 + 2048
    assert gemma.sequence_bytes(32768) < 0.2 * 26 * 2048 * layer_page


def test_bytes_per_head_and_token_in_every_format():
    per_token = {name: fmt.token_bytes(128, 16) for name, fmt in KV_FORMATS.items()}
    assert per_token == {
        "fp32": 1024,
        "fp16": 512,
        "bf16": 512,
        "int8": 128 + 128 * 4 / 16 + 128 + 4,
        "int4": 2 * (64 + 4),
        "k8v4": 128 + 128 * 4 / 16 + 64 + 4,
    }


def test_int4_groups_hold_at_most_128_elements():
    assert KV_FORMATS["int4"].token_bytes(64, 16) == 2 * (32 + 4)
    assert KV_FORMATS["int4"].token_bytes(192, 16) == 2 * (96 + 8)


def test_auto_follows_the_weights():
    assert kv_format("auto", "bfloat16").name == "bf16"
    assert kv_format("int8", "bfloat16").name == "int8"
    with pytest.raises(ConfigError, match="'fp8' is not one of auto, fp32"):
        kv_format("fp8", "float16")


def test_blocks_and_sequences_of_a_budget():
    plan = plan_capacity(SMOLLM2_135M, memory_bytes=2 * GIB, dtype="float32", kv_format=KV_FORMATS["fp32"])
    assert plan.weight_bytes == 538_060_032
    assert plan.page_bytes == 16 * 30 * 2 * 3 * 64 * 4
    assert plan.num_blocks == (2 * GIB - 538_060_032) // plan.page_bytes
    assert plan.max_sequences == (plan.num_blocks - 1) // 512
    assert plan.limit is None
    assert plan.missing_bytes == 0


def test_weights_that_do_not_fit():
    plan = plan_capacity(LLAMA_2_70B, memory_bytes=80 * GB, dtype="float16", kv_format=FP16)
    assert plan.limit == "weights"
    assert plan.num_blocks == plan.max_sequences == plan.max_cached_tokens == 0
    assert plan.missing_bytes == 2 * 68_976_648_192 + 1_342_177_280 + plan.page_bytes - 80 * GB


def test_a_sequence_that_does_not_fit():
    weights = 2 * SMOLLM2_135M.num_parameters
    page = cost(SMOLLM2_135M).page_bytes
    plan = plan_capacity(SMOLLM2_135M, memory_bytes=weights + 101 * page, dtype="float16", kv_format=FP16)
    assert plan.limit == "sequence"
    assert plan.max_cached_tokens == 1600
    assert plan.missing_bytes == (512 + 1 - 101) * page
    enough = plan_capacity(SMOLLM2_135M, memory_bytes=weights + 513 * page, dtype="float16", kv_format=FP16)
    assert (enough.limit, enough.missing_bytes, enough.max_sequences) == (None, 0, 1)


def test_the_tightest_stage_decides():
    plan = plan_capacity(SMOLLM2_135M, memory_bytes=GIB, dtype="float16", kv_format=FP16, shards=Shards(pp=4))
    stages = [rank_parameters(SMOLLM2_135M, Shards(pp=4), stage) * 2 for stage in range(4)]
    assert plan.weight_bytes == max(stages)
    assert plan.devices == 4


def test_smallest_fit():
    def fit(memory: int) -> Shards | None:
        return smallest_fit(LLAMA_2_70B, memory_bytes=memory, dtype="float16", kv_format=FP16)

    assert fit(80 * GB) == Shards(tp=2)
    assert fit(24 * GB) == Shards(tp=8)
    assert fit(GB) is None


@pytest.mark.parametrize(
    ("shards", "message"),
    [
        (Shards(tp=3), "tp: 3 does not divide the model's 64 attention heads"),
        (Shards(tp=0), "tp: 0 does not divide"),
        (Shards(pp=81), "pp: 81 is not between 1 and the model's 80 layers"),
    ],
)
def test_impossible_shards(shards, message):
    with pytest.raises(ConfigError, match=message):
        plan_capacity(LLAMA_2_70B, memory_bytes=80 * GB, dtype="float16", kv_format=FP16, shards=shards)


def test_impossible_lengths_and_types():
    with pytest.raises(ConfigError, match="max_model_len: 5000 is not between 1 and the model's context of 4096"):
        plan_capacity(LLAMA_2_70B, memory_bytes=GB, dtype="float16", kv_format=FP16, max_model_len=5000)
    with pytest.raises(ConfigError, match="dtype: 'int3' is not one of"):
        plan_capacity(LLAMA_2_70B, memory_bytes=GB, dtype="int3", kv_format=FP16)
