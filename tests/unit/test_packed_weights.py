"""Checkpoints in the native kernels' form: what is packed how, and that it multiplies as the dequantised weights do."""

import gguf
import numpy as np
import pytest
import torch

from warmroot.actors.kernels.library import native
from warmroot.actors.models.loader import load_model
from warmroot.cluster.errors import ConfigError

pytestmark = pytest.mark.skipif(native() is None, reason="no native kernels here")

Storage = gguf.GGMLQuantizationType
CPU = torch.device("cpu")
HIDDEN, INNER, HEADS, KV_HEADS, VOCAB, LAYERS = 256, 512, 4, 2, 96, 2
HEAD_DIM = HIDDEN // HEADS
SHAPES = {
    "attn_q": (HIDDEN, HIDDEN),
    "attn_k": (KV_HEADS * HEAD_DIM, HIDDEN),
    "attn_v": (KV_HEADS * HEAD_DIM, HIDDEN),
    "attn_output": (HIDDEN, HIDDEN),
    "ffn_gate": (INNER, HIDDEN),
    "ffn_up": (INNER, HIDDEN),
    "ffn_down": (HIDDEN, INNER),
}


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("WARMROOT_CACHE_DIR", str(tmp_path / "cache"))


def random_blocks(rng, shape, storage):
    """Blocks that gguf cannot quantise to are made of random bits with small scales."""
    if storage not in (Storage.Q4_K, Storage.Q5_K, Storage.Q6_K):
        return gguf.quantize(0.08 * rng.standard_normal(shape, dtype=np.float32), storage)
    size, block_bytes = gguf.GGML_QUANT_SIZES[storage]
    blocks = rng.integers(0, 256, (shape[0], shape[1] // size, block_bytes), dtype=np.uint8)
    scale = np.frombuffer(np.float16(2e-4).tobytes(), dtype=np.uint8)
    if storage == Storage.Q6_K:
        blocks[..., -2:] = scale
    else:
        blocks[..., :2] = blocks[..., 2:4] = scale
    return blocks.reshape(shape[0], -1)


def write_model(path, storages, embedding=Storage.Q8_0):
    """A Llama file whose linears are stored as ``storages`` says, a name or "" for all others."""
    rng = np.random.default_rng(0)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(LAYERS)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(VOCAB)
    writer.add_eos_token_id(2)

    def add(name, shape, storage):
        writer.add_tensor(name, random_blocks(rng, shape, storage), raw_dtype=storage)

    add("token_embd.weight", (VOCAB, HIDDEN), embedding)
    for layer in range(LAYERS):
        for name, shape in SHAPES.items():
            add(f"blk.{layer}.{name}.weight", shape, storages.get(name, storages[""]))
        for name in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"blk.{layer}.{name}.weight", np.ones(HIDDEN, dtype=np.float32))
    writer.add_tensor("output_norm.weight", np.ones(HIDDEN, dtype=np.float32))
    for write in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file):
        write()
    writer.close()
    return path


def linears(decoder):
    for layer in decoder.layers:
        yield from (layer.attention.qkv, layer.attention.out, layer.mlp.gate_up, layer.mlp.down)
    yield decoder.head


def products(decoder):
    """Every linear applied to one input of its size."""
    generator = torch.Generator().manual_seed(1)
    inputs = {size: torch.randn((5, size), generator=generator) for size in (HIDDEN, INNER)}
    return [linear.apply(inputs[linear.parts[0].shape[1]]) for linear in linears(decoder)]


@pytest.mark.parametrize(
    "storage", [Storage.Q4_0, Storage.Q4_1, Storage.Q8_0, Storage.Q4_K, Storage.Q5_K, Storage.Q6_K]
)
def test_blocks_multiply_as_their_values_do(tmp_path, storage):
    path = write_model(tmp_path / "model.gguf", {"": storage})
    packed = load_model(path, dtype="auto", device=CPU)
    assert packed.weights_format == (
        storage.name.lower() if storage == Storage.Q8_0 else f"{storage.name.lower()}+q8_0"
    )
    exact = load_model(path, dtype="float32", device=CPU)
    assert exact.weights_format == "float32"
    for got, expected in zip(products(packed), products(exact), strict=True):
        # 8-bit inputs: about half a percent of the result's size.
        assert (got - expected).norm() < 0.012 * expected.norm()


def test_parts_of_one_linear_that_are_stored_alike_are_one(tmp_path):
    path = write_model(tmp_path / "model.gguf", {"": Storage.Q4_0, "attn_v": Storage.Q6_K, "ffn_up": Storage.F16})
    decoder = load_model(path, dtype="auto", device=CPU)
    layer = decoder.layers[0]
    shapes = [
        [part.shape for part in linear.parts] for linear in (layer.attention.qkv, layer.mlp.gate_up, layer.mlp.down)
    ]
    rows = HIDDEN + KV_HEADS * HEAD_DIM
    assert shapes == [
        [(rows, HIDDEN), (KV_HEADS * HEAD_DIM, HIDDEN)],
        [(INNER, HIDDEN), (INNER, HIDDEN)],
        [(HIDDEN, INNER)],
    ]
    assert decoder.weights_format == "q4_0+q6_k+q8_0"
    exact = load_model(path, dtype="float32", device=CPU)
    for got, expected in zip(products(decoder), products(exact), strict=True):
        assert (got - expected).norm() < 0.012 * expected.norm()


@pytest.mark.parametrize(
    ("dtype", "quantization", "name", "table"),
    [
        ("auto", "auto", "q4_0+q8_0", torch.float16),
        ("auto", "none", "float16", torch.float16),
        ("float16", "auto", "float16", torch.float16),
        ("bfloat16", "auto", "bfloat16", torch.bfloat16),
        ("float32", "none", "float32", torch.float32),
        ("auto", "int8", "int8", torch.float16),
        ("float32", "int8", "int8", torch.float32),
    ],
)
def test_forms(tmp_path, dtype, quantization, name, table):
    path = write_model(tmp_path / "model.gguf", {"": Storage.Q4_0})
    decoder = load_model(path, dtype=dtype, quantization=quantization, device=CPU)
    assert (decoder.weights_format, decoder.table_dtype, decoder.dtype) == (name, table, torch.float32)
    exact = load_model(path, dtype="float32", device=CPU)
    for got, expected in zip(products(decoder), products(exact), strict=True):
        assert (got - expected).norm() < 0.012 * expected.norm()


def test_float_embedding_makes_a_float_head(tmp_path):
    path = write_model(tmp_path / "model.gguf", {"": Storage.Q4_0}, embedding=Storage.F16)
    decoder = load_model(path, dtype="auto", device=CPU)
    assert decoder.weights_format == "q4_0"
    exact = load_model(path, dtype="float32", device=CPU)
    hidden = torch.randn(3, HIDDEN)
    torch.testing.assert_close(decoder.logits(hidden), exact.logits(hidden), atol=1e-4, rtol=1e-4)


def test_unknown_quantization(tmp_path):
    with pytest.raises(ConfigError, match="quantization: 'int3' is not one of auto, none, int8"):
        load_model(tmp_path, dtype="auto", quantization="int3", device=CPU)
