"""From a path to a decoder: Hugging Face folders and GGUF files."""

import json
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, cast

import torch

from ...cluster.errors import ConfigError, ModelLoadError
from ...cluster.model_config import spec_from_gguf, spec_from_hf
from ...cluster.model_spec import ModelSpec
from ..attention import make_backend
from ..kernels.library import native
from ..layers.linear import DenseMethod, LinearMethod, PackedHalfMethod
from .available import cpu_kernels
from .decoder import Decoder
from .gguf_source import GgufSource
from .linears import Linears, TorchLinears, stored_blocks
from .safetensors_source import SafetensorsSource
from .tensors import wanted_tensors
from .weights import Progress, Weights, WeightSource

DtypeName = Literal["auto", "float32", "float16", "bfloat16"]
QUANTIZATIONS = ("auto", "none", "int8")
_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def read_spec(path: Path) -> ModelSpec:
    """The facts of a model folder or GGUF file, without its weights.

    Raises ModelLoadError when there is no such model or its architecture is not supported.
    """
    return _gguf_spec(GgufSource(path)) if _is_gguf(path) else _folder_spec(path)


def stored_format(path: Path) -> str:
    """The commonest block format of a GGUF file's linears, such as ``q4_1``; empty for weights that are floats."""
    if not _is_gguf(path):
        return ""
    source = GgufSource(path)
    return stored_blocks(source, _gguf_spec(source)).partition("+")[0]


def load_model(
    path: Path, *, dtype: str, device: torch.device, quantization: str = "auto", progress: Progress | None = None
) -> Decoder:
    """Load the weights of a model folder or GGUF file.

    ``dtype`` is auto, float32, float16 or bfloat16; ``quantization`` auto, none or int8 (see ``ModelConfig``). On a CPU
    activations are float32: always with the native kernels, without them where weights are kept as float16. On CUDA,
    auto is the checkpoint's dtype. Raises ModelLoadError, or ConfigError for what the device cannot do.
    """
    if dtype not in ("auto", *_DTYPES):
        raise ConfigError(f"dtype must be auto, float32, float16 or bfloat16, got {dtype}", param="dtype")
    if quantization not in QUANTIZATIONS:
        raise ConfigError(
            f"quantization: {quantization!r} is not one of {', '.join(QUANTIZATIONS)}", param="quantization"
        )
    source: WeightSource
    if _is_gguf(path):
        source = GgufSource(path)
        spec = _gguf_spec(source)
    else:
        spec, source = _folder_spec(path), SafetensorsSource(path)
    weights = Weights(source, wanted_tensors(spec), progress)
    if device.type == "cpu" and _native_linears():
        from .packed_cache import load_packed  # needs the native library
        from .packing import Packing

        packing = Packing.of(source, spec, quantization, _DTYPES.get(dtype))
        return _decoder(spec, weights, load_packed(weights, spec, packing), torch.float32, device)
    if quantization == "int8":
        here = "a GPU" if device.type == "cuda" else cpu_kernels()
        raise ConfigError(
            f"quantization: {quantization} needs a CPU with native kernels; this is {here}", param="quantization"
        )
    chosen = source.dtype if dtype == "auto" else _DTYPES[dtype]
    packed = device.type == "cpu" and (dtype == "auto" or chosen == torch.float16)
    activations = torch.float32 if packed else chosen
    method: LinearMethod = DenseMethod(activations, device)
    if packed and PackedHalfMethod.is_available():
        method = PackedHalfMethod()
    linears = TorchLinears(spec, weights, method, torch.float16 if packed else chosen, device)
    return _decoder(spec, weights, linears, activations, device)


def _native_linears() -> bool:
    return native() is not None and find_spec("warmroot.actors.kernels.linear") is not None


def _decoder(
    spec: ModelSpec, weights: Weights, linears: Linears, activations: torch.dtype, device: torch.device
) -> Decoder:
    return Decoder(spec, weights, linears, make_backend(device, activations), dtype=activations, device=device)


def _is_gguf(path: Path) -> bool:
    return path.suffix == ".gguf"


def _gguf_spec(source: GgufSource) -> ModelSpec:
    spec = spec_from_gguf(source.metadata(), source.tensor_names)
    return replace(spec, rope=replace(spec.rope, frequency_factors=source.frequency_factors()))


def _folder_spec(folder: Path) -> ModelSpec:
    config = _read_json(folder / "config.json")
    if config is None:
        raise ModelLoadError(f"{folder}: no config.json (expected a Hugging Face model folder or a .gguf file)")
    if "quantization_config" in config:
        method = config["quantization_config"].get("quant_method", "unknown")
        raise ModelLoadError(f"{folder}: weights quantised with {method} are not supported")
    generation = _read_json(folder / "generation_config.json") or {}
    return spec_from_hf(config, generation)


def _read_json(path: Path) -> dict[str, Any] | None:
    if not path.is_file():
        return None
    try:
        return cast("dict[str, Any]", json.loads(path.read_text(encoding="utf-8")))
    except ValueError as error:
        raise ModelLoadError(f"{path}: not JSON: {error}") from error
