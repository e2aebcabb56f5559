"""Bytes of weights and of KV pages as ``warmroot plan`` predicts them, against what loading keeps."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from gguf_models import Storage, write_model
from published_models import awq, gptq, write_folder

from warmroot.actors.attention.kv_memory import KvMemory
from warmroot.actors.kernels.library import native
from warmroot.actors.kernels.linear import PackedWeight
from warmroot.actors.layers.latent_attention import LatentSelfAttention
from warmroot.actors.layers.moe_router import Router
from warmroot.actors.layers.norm import QueryKeyNorm, RMSNorm
from warmroot.actors.models.decoder import Decoder
from warmroot.actors.models.loader import load_model
from warmroot.actors.models.source import resolve_model
from warmroot.actors.models.spec import read_spec, unit_format
from warmroot.actors.parallel.shard import Shard
from warmroot.actors.runner.memory import page_bytes
from warmroot.cluster.capacity import CapacityPlan, Needs, plan_capacity
from warmroot.cluster.config import ModelConfig
from warmroot.cluster.errors import ModelLoadError
from warmroot.cluster.kv_formats import KV_FORMATS
from warmroot.cluster.parallel_layout import ParallelLayout
from warmroot.cluster.topology import Topology
from warmroot.deploy.cli.plan_weights import kept_weights

from . import test_moe_gguf
from .conftest import MIXED, Family

pytestmark = pytest.mark.skipif(native() is None, reason="weights are packed by the native kernels")

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 3,
}
FAMILIES = {
    "llama": Family("LlamaForCausalLM", SIZES | {"attention_bias": True, "mlp_bias": True}),
    "tied": Family("LlamaForCausalLM", SIZES | {"tie_word_embeddings": True}),
    "qwen2_moe": Family(
        "Qwen2MoeForCausalLM",
        SIZES
        | {
            "num_experts": 8,
            "moe_intermediate_size": 64,
            "shared_expert_intermediate_size": 96,
            "mlp_only_layers": [1],
        },
    ),
    "gemma3": Family(
        "Gemma3ForCausalLM",
        SIZES | {"head_dim": 16, "sliding_window": 16, "num_hidden_layers": 5, "layer_types": MIXED},
    ),
    "mixtral": Family("MixtralForCausalLM", SIZES | {"num_local_experts": 8}),
    "deepseek_v3": Family(
        "DeepseekV3ForCausalLM",
        SIZES
        | {
            "num_key_value_heads": 4,
            "q_lora_rank": 32,
            "kv_lora_rank": 32,
            "qk_nope_head_dim": 16,
            "qk_rope_head_dim": 16,
            "v_head_dim": 16,
            "n_routed_experts": 8,
            "n_group": 4,
            "topk_group": 2,
            "moe_intermediate_size": 64,
            "first_k_dense_replace": 1,
        },
    ),
}


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request, tmp_path_factory):
    path = tmp_path_factory.mktemp(request.param)
    FAMILIES[request.param].build().save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def smollm2():
    try:
        return resolve_model("smollm2")
    except ModelLoadError as error:
        pytest.skip(str(error))


def inside(value: Any, seen: set[int]) -> Iterator[Any]:
    """An object and all that it is made of."""
    if id(value) in seen or isinstance(value, (type, str, bytes, int, float)):
        return
    seen.add(id(value))
    yield value
    if isinstance(value, dict):
        parts = list(value.values())
    elif isinstance(value, (list, tuple)):
        parts = list(value)
    elif type(value).__module__.startswith("warmroot.actors"):
        slots = [name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ())]
        parts = [*getattr(value, "__dict__", {}).values(), *(getattr(value, name, None) for name in slots)]
    else:
        parts = []
    for part in parts:
        yield from inside(part, seen)


def kept_bytes(decoder: Decoder) -> int:
    """Packed weights with their biases, the table, norms and the corrections of routers, each once."""
    tensors: list[torch.Tensor] = [decoder.embedding._table]
    for part in inside(decoder, set()):
        if isinstance(part, PackedWeight):
            tensors += [part.data] if part.bias is None else [part.data, part.bias]
        elif isinstance(part, RMSNorm):
            tensors.append(part.weight)
        elif isinstance(part, LatentSelfAttention):
            tensors += [part.key_up, part.value_up]
        elif isinstance(part, Router) and part.correction is not None:
            tensors.append(part.correction)
        elif isinstance(part, QueryKeyNorm):
            tensors += part._weights
    kept = {tensor.data_ptr(): tensor.nbytes for tensor in tensors if tensor.numel()}
    return sum(kept.values())


def check(path, topology: Topology, *, redundant: int = 0, **options: str) -> None:
    config = ModelConfig.model_validate({"model": str(path), **options})
    spec = read_spec(path)
    weights = unit_format(path, config.quantization)
    layout = ParallelLayout.of(spec, topology, num_redundant_experts=redundant, weights=weights)
    kept = kept_weights(config, path, spec, "cpu")
    needs = Needs(memory_bytes=10**9, weights=kept, kv_format=KV_FORMATS["fp16"], max_model_len=spec.max_position)
    plan = plan_capacity(layout, needs)
    alone = Shard.whole(spec).groups
    for rank in layout.ranks:
        decoder = load_model(
            path,
            dtype=config.dtype,
            quantization=config.quantization,
            device=torch.device("cpu"),
            shard=Shard(layout, rank.place.rank, alone),
        )
        assert rank.weight_bytes(kept) == kept_bytes(decoder), rank.place
        assert decoder.weights_format == kept.name
        check_pages(decoder, plan)


def check_pages(decoder: Decoder, plan: CapacityPlan) -> None:
    rank, dtype = plan.ranks[decoder.own.place.rank], torch.float16
    layout = plan.pages.stage(decoder.own.layers)
    assert rank.page_bytes == page_bytes(decoder.spec, layout, dtype)
    spec, cpu = decoder.spec, torch.device("cpu")
    memory = KvMemory.allocate(layout, 3, spec.cache_heads, spec.cache_dim, dtype, cpu, decoder.backend)
    assert 3 * rank.page_bytes == sum(pages.nbytes for pages in (*memory.keys, *memory.values))


@pytest.mark.model
@pytest.mark.parametrize(
    ("topology", "options"),
    [
        (Topology(), {}),
        (Topology(tp=2), {}),
        (Topology(pp=2), {}),  # the last stage packs the table for its head, and looks up nothing in it
        (Topology(), {"quantization": "int8"}),
        pytest.param(Topology(), {"quantization": "none"}, marks=pytest.mark.slow),
        pytest.param(Topology(tp=2), {"dtype": "float32"}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_smollm2(smollm2, topology, options):
    check(smollm2, topology, **options)


@pytest.mark.parametrize("topology", [Topology(), Topology(tp=2), Topology(tp=2, pp=2)], ids=str)
@pytest.mark.parametrize("options", [{}, {"quantization": "int8"}, {"dtype": "bfloat16"}], ids=str)
def test_small_models(folder, topology, options):
    check(folder, topology, **options)


@pytest.mark.parametrize(
    "storage", [Storage.Q4_0, Storage.Q8_0, Storage.Q4_K, Storage.Q6_K], ids=lambda kind: kind.name
)
@pytest.mark.parametrize("quantization", ["auto", "int8", "none"])
def test_stored_blocks(tmp_path, storage, quantization):
    path = write_model(tmp_path / "model.gguf", {"": storage, "ffn_up": Storage.F16, "attn_v": Storage.Q6_K})
    check(path, Topology(), quantization=quantization)
    check(path, Topology(pp=2), quantization=quantization)


@pytest.mark.parametrize(
    "settings",
    [gptq(), gptq(sym=True, bits=8, group_size=-1), gptq(desc_act=True), gptq(lm_head=True), awq()],
    ids=lambda settings: f"{settings['quant_method']}-{settings['bits']}",
)
def test_published_codes(tmp_path, settings):
    path = tmp_path / "model"
    write_folder(path, settings)
    for options in ({}, {"dtype": "bfloat16"}, {"quantization": "none"}, {"quantization": "int4"}):
        check(path, Topology(), **options)
    check(path, Topology(pp=2))
    if not settings.get("desc_act"):  # whose groups ranks fill up
        check(path, Topology(tp=2))


@pytest.mark.parametrize("quantization", ["int4", "int4-g64", "int4-g128"])
def test_four_bits_on_load(tmp_path, quantization):
    path = write_model(tmp_path / "model.gguf", {"": Storage.F16})
    check(path, Topology(), quantization=quantization)
    check(path, Topology(tp=2), quantization=quantization)


@pytest.mark.parametrize("architecture", test_moe_gguf.FAMILIES)
@pytest.mark.parametrize("storage", [Storage.Q4_0, Storage.Q8_0], ids=str)
def test_stored_blocks_of_experts(tmp_path, architecture, storage):
    path = tmp_path / "model.gguf"
    test_moe_gguf.write_gguf(path, architecture, test_moe_gguf.FAMILIES[architecture].build(), storage)
    check(path, Topology())
    check(path, Topology(tp=2, ep=2))


@pytest.mark.parametrize("name", ["qwen2_moe", "mixtral", "deepseek_v3"])
@pytest.mark.parametrize(("topology", "redundant"), [(Topology(tp=2, ep=2), 0), (Topology(tp=2, ep=4), 4)], ids=str)
def test_experts(tmp_path, name, topology, redundant):
    FAMILIES[name].build().save_pretrained(tmp_path)
    check(tmp_path, topology, redundant=redundant)
