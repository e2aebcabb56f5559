"""Small and well-known models to cut, for tests of layouts."""

from warmroot.cluster.model_spec import MlaSpec, ModelSpec, MoeSpec, RopeSpec
from warmroot.cluster.parallel_layout import ParallelLayout
from warmroot.cluster.topology import Topology


def model(**values) -> ModelSpec:
    values = {
        "architecture": "llama",
        "num_layers": 4,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_heads": 8,
        "num_kv_heads": 4,
        "head_dim": 8,
        "vocab_size": 100,
        "max_position": 128,
        "norm_eps": 1e-5,
        "rope": RopeSpec(rotary_dim=8),
        "tie_embeddings": False,
        "query_scale": 8**-0.5,
    } | values
    return ModelSpec(layer_windows=(None,) * values["num_layers"], **values)


SMOLLM2 = model(
    num_layers=30,
    hidden_size=576,
    intermediate_size=1536,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    vocab_size=49152,
    tie_embeddings=True,
)
LLAMA_70B = model(
    num_layers=80,
    hidden_size=8192,
    intermediate_size=28672,
    num_heads=64,
    num_kv_heads=8,
    head_dim=128,
    vocab_size=128256,
)
MOE = model(
    architecture="qwen2_moe",
    qkv_bias=True,
    moe=MoeSpec(
        num_experts=8,
        experts_per_token=2,
        intermediate_size=64,
        sparse_layers=(False, True, True, True),
        shared_intermediate_size=96,
        shared_gate=True,
    ),
)
OLMOE = model(
    architecture="olmoe",
    qk_norm=True,
    qk_norm_whole=True,
    moe=MoeSpec(num_experts=8, experts_per_token=2, intermediate_size=32, sparse_layers=(True,) * 4),
)
MLA = model(
    architecture="deepseek_v3",
    num_kv_heads=8,
    head_dim=24,
    mla=MlaSpec(q_lora_rank=40, kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=12),
    moe=MoeSpec(
        num_experts=8,
        experts_per_token=2,
        intermediate_size=32,
        sparse_layers=(False, True, True, True),
        shared_intermediate_size=32,
        scoring="sigmoid",
        correction_bias=True,
    ),
)
SPECS = {"dense": model(), "tied": model(tie_embeddings=True), "moe": MOE, "olmoe": OLMOE, "mla": MLA}


def layout(spec, tp=1, pp=1, ep=1, **options) -> ParallelLayout:
    return ParallelLayout.of(spec, Topology(tp=tp, pp=pp, ep=ep), **options)
