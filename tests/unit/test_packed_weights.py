"""Checkpoints in the native kernels' form: what is packed how, and that it multiplies as the dequantised weights do."""

import pytest
import torch
from gguf_models import HEAD_DIM, HIDDEN, INNER, KV_HEADS, Storage, write_model

from warmroot.actors.kernels.library import native
from warmroot.actors.models.loader import load_model
from warmroot.cluster.errors import ConfigError

pytestmark = pytest.mark.skipif(native() is None, reason="no native kernels here")

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("WARMROOT_CACHE_DIR", str(tmp_path / "cache"))


def linears(decoder):
    for layer in decoder.layers:
        yield from (layer.attention.qkv, layer.attention.out, layer.mlp.gate_up, layer.mlp.down)
    yield decoder.head


def products(decoder):
    """Every linear applied to one input of its size."""
    generator = torch.Generator().manual_seed(1)
    inputs = {size: torch.randn((5, size), generator=generator) for size in (HIDDEN, INNER)}
    # Which kernels multiply float16 is measured: they may be another library's.
    return [linear.apply(inputs[getattr(linear, "own", linear).parts[0].shape[1]]) for linear in linears(decoder)]


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
    with pytest.raises(ConfigError, match="quantization: 'int3' is not one of auto, none, int8, int4"):
        load_model(tmp_path, dtype="auto", quantization="int3", device=CPU)
