"""From a path to a decoder: Hugging Face folders and GGUF files."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, cast

import torch

from ...cluster.errors import ConfigError, ModelLoadError
from ...cluster.model_config import spec_from_gguf, spec_from_hf
from ...cluster.model_spec import ModelSpec
from ..attention import make_backend
from ..layers.linear import DenseMethod, LinearMethod, PackedHalfMethod
from .decoder import Decoder
from .gguf_source import GgufSource
from .safetensors_source import SafetensorsSource
from .tensors import wanted_tensors
from .weights import Progress, Weights, WeightSource

DtypeName = Literal["auto", "float32", "float16", "bfloat16"]
_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def read_spec(path: Path) -> ModelSpec:
    """The facts of a model folder or GGUF file, without its weights.

    Raises ModelLoadError when there is no such model or its architecture is not supported.
    """
    return _gguf_spec(GgufSource(path)) if _is_gguf(path) else _folder_spec(path)


def load_model(path: Path, *, dtype: str, device: torch.device, progress: Progress | None = None) -> Decoder:
    """Load the weights of a model folder or GGUF file.

    ``dtype`` is auto, float32, float16 or bfloat16. On a CPU, auto and float16 keep weights as packed float16 and
    compute in float32; on CUDA, auto is the checkpoint's. Raises ModelLoadError, or ConfigError for an unknown dtype.
    """
    if dtype not in ("auto", *_DTYPES):
        raise ConfigError(f"dtype must be auto, float32, float16 or bfloat16, got {dtype}", param="dtype")
    source: WeightSource
    if _is_gguf(path):
        source = GgufSource(path)
        spec = _gguf_spec(source)
    else:
        spec, source = _folder_spec(path), SafetensorsSource(path)
    chosen = source.dtype if dtype == "auto" else _DTYPES[dtype]
    packed = device.type == "cpu" and (dtype == "auto" or chosen == torch.float16)
    activations = torch.float32 if packed else chosen
    method: LinearMethod = DenseMethod(activations, device)
    if packed and PackedHalfMethod.is_available():
        method = PackedHalfMethod()
    return Decoder(
        spec,
        Weights(source, wanted_tensors(spec), progress),
        method,
        make_backend(device, activations),
        dtype=activations,
        table_dtype=torch.float16 if packed else chosen,
        device=device,
    )


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
