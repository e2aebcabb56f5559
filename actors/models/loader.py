"""From a path to a decoder: Hugging Face folders and GGUF files."""

from pathlib import Path
from typing import Literal, get_args

import torch

from ...cluster.config import QuantizationName
from ...cluster.errors import ConfigError
from ...cluster.parallel_layout import RankLayout
from ...cluster.weight_formats import ON_LOAD, weights_name
from ..attention import make_backend, make_latent_backend
from ..kernels.library import native
from ..layers.linear import DenseMethod, LinearMethod, PackedHalfMethod
from ..parallel.shard import Shard
from .decoder import Decoder
from .gguf_source import GgufSource
from .linears import Linears, TorchLinears
from .on_load import QuantisingMethod
from .safetensors_source import SafetensorsSource
from .spec import is_gguf, read_quantization, read_spec
from .tensors import wanted_parts, wanted_shapes
from .weights import Progress, Weights, WeightSource

DtypeName = Literal["auto", "float32", "float16", "bfloat16"]
QUANTIZATIONS = get_args(QuantizationName)
_PUBLISHED = ("gptq", "awq")
_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def load_model(
    path: Path,
    *,
    dtype: str,
    device: torch.device,
    quantization: str = "auto",
    progress: Progress | None = None,
    shard: Shard | None = None,
) -> Decoder:
    """Load the weights of a model folder or GGUF file, or only the part that a rank holds.

    ``dtype`` is auto, float32, float16 or bfloat16; ``quantization`` one of ``QUANTIZATIONS`` (see ``ModelConfig``).
    On a CPU activations are float32: always with the native kernels, without them where weights are kept as float16. On
    CUDA, auto is the checkpoint's dtype. Raises ModelLoadError, or ConfigError for what the device cannot do.
    """
    if dtype not in ("auto", *_DTYPES):
        raise ConfigError(f"dtype must be auto, float32, float16 or bfloat16, got {dtype}", param="dtype")
    if quantization not in QUANTIZATIONS:
        raise ConfigError(
            f"quantization: {quantization!r} is not one of {', '.join(QUANTIZATIONS)}", param="quantization"
        )
    shard = shard or Shard.whole(read_spec(path))
    return make_decoder(
        open_source(path), shard, dtype=dtype, device=device, quantization=quantization, progress=progress
    )


def open_source(path: Path) -> WeightSource:
    """The weights of a model folder or GGUF file. Raises ModelLoadError."""
    return GgufSource(path) if is_gguf(path) else SafetensorsSource(path, read_quantization(path))


def make_decoder(
    source: WeightSource,
    shard: Shard,
    *,
    dtype: str,
    device: torch.device,
    quantization: str,
    progress: Progress | None = None,
    must_be_finite: bool = False,
) -> Decoder:
    """A rank's share of a model with the weights of ``source``. Raises as ``load_model``.

    ``must_be_finite``: weights that are read as floats must all be finite.
    """
    own = shard.own
    _check_method(source, quantization)
    weights = Weights(source, wanted_shapes(own), progress, wanted_parts(own), must_be_finite=must_be_finite)
    if device.type == "cpu" and _native_linears():
        linears, activations = _packed(own, weights, dtype, quantization), torch.float32
    else:
        linears, activations = _by_torch(own, weights, dtype, quantization, device)
    backend = (make_backend if own.spec.mla is None else make_latent_backend)(device, activations)
    return Decoder(shard, weights, linears, backend, dtype=activations, device=device)


def _packed(own: RankLayout, weights: Weights, dtype: str, quantization: str) -> Linears:
    from .chosen_linears import choose  # these need the native library
    from .packed_cache import load_packed
    from .packing import Packing

    packing = Packing.of(weights.source, own.spec, quantization, _DTYPES.get(dtype))
    packed = load_packed(weights, own, packing)
    return choose(packed) if packing.is_all_float16 else packed


def _check_method(source: WeightSource, quantization: str) -> None:
    stored = source.quantization
    if quantization in _PUBLISHED and (stored is None or stored.quant_method != quantization):
        found = "not quantised by one" if stored is None else f"quantised with {stored.quant_method}"
        raise ConfigError(
            f"quantization: {quantization} says what the checkpoint is, but its weights are {found}; leave it away",
            param="quantization",
        )


def _by_torch(
    own: RankLayout, weights: Weights, dtype: str, quantization: str, device: torch.device
) -> tuple[TorchLinears, torch.dtype]:
    """The linears and the activations' dtype."""
    chosen = weights.source.dtype if dtype == "auto" else _DTYPES[dtype]
    halves = device.type == "cpu" and (dtype == "auto" or chosen == torch.float16)
    activations = torch.float32 if halves else chosen
    method: LinearMethod = DenseMethod(activations, device)
    if halves and PackedHalfMethod.is_available():
        method = PackedHalfMethod()
    head = method
    if quantization in ON_LOAD:
        made = ON_LOAD[quantization]
        method = QuantisingMethod(8 if made.bits == 8 else 4, made.group, device)
        head = QuantisingMethod(8, 32, device)
    table_dtype = torch.float16 if halves else chosen
    name = weights_name(weights.source.quantization, quantization, str(table_dtype).removeprefix("torch."))
    keeps_codes = quantization not in ("none", *ON_LOAD)
    return TorchLinears(
        own, weights, method, table_dtype, device, name=name, keeps_codes=keeps_codes, head=head
    ), activations


def _native_linears() -> bool:
    library = native()
    return library is not None and hasattr(library.functions, "wr_linear")
