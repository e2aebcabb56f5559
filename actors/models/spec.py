"""What a model's files say of it, without reading weights (and without torch)."""

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any, cast

import numpy
from gguf import GGMLQuantizationType as Storage

from ...cluster.damaged import reading
from ...cluster.errors import ConfigError, ModelLoadError
from ...cluster.model_config import spec_from_gguf, spec_from_hf
from ...cluster.model_spec import ModelSpec
from ...cluster.parallel_layout import ParallelLayout
from ...cluster.quantization_config import QuantizationConfig
from ...cluster.topology import Topology
from ...cluster.weight_formats import ON_LOAD, WEIGHT_FORMATS, WeightFormat, grouped_format
from ...router.gguf_metadata import GgufHeader, read_gguf_header
from .gguf_names import gguf_name, has_sandwich_norms

_FACTORS = "rope_freqs.weight"
"""Llama 3's rope scaling, which GGUF files of that family hold as a tensor of float32."""
_FLOATS = (Storage.F32, Storage.F16, Storage.BF16)


def is_gguf(path: Path) -> bool:
    """True for a GGUF file, False for a folder."""
    return path.suffix == ".gguf"


def read_spec(path: Path) -> ModelSpec:
    """The facts of a model folder or GGUF file.

    Raises ModelLoadError when there is no such model or its architecture is not supported.
    """
    return _gguf_spec(path) if is_gguf(path) else _folder_spec(path)


def stored_format(path: Path) -> str:
    """The commonest block format of a GGUF file's weights, such as ``q4_1``; empty where most are floats."""
    if not is_gguf(path):
        return ""
    layers = [tensor for name, tensor in read_gguf_header(path).tensors.items() if name.startswith("blk.")]
    kinds = Counter(tensor.storage for tensor in layers if len(tensor.shape) > 1)
    with reading(path):
        (kind, _), *_ = kinds.most_common(1)
        return "" if kind in _FLOATS else Storage(kind).name.lower()


def stored_formats(path: Path, names: Iterable[str]) -> dict[str, str]:
    """The block formats of those tensors that a GGUF file holds quantised, by Hugging Face's names."""
    if not is_gguf(path):
        return {}
    tensors = read_gguf_header(path).tensors
    sandwich = has_sandwich_norms(tensors)
    with reading(path):
        kinds = {name: tensors[gguf_name(name, sandwich=sandwich)].storage for name in names}
        return {name: Storage(kind).name.lower() for name, kind in kinds.items() if kind not in _FLOATS}


def stored_dtype(path: Path) -> str:
    """Float type of most of the weights, as config.json says it; float16 where nothing does."""
    config = {} if is_gguf(path) else _read_json(path / "config.json") or {}
    return str(config.get("dtype") or config.get("torch_dtype") or "float16")


def read_quantization(path: Path) -> QuantizationConfig | None:
    """How GPTQ or AWQ has quantised a folder's weights; None for others.

    Raises ConfigError, naming the setting, for what cannot be read.
    """
    if is_gguf(path):
        return None
    config = _read_json(path / "config.json") or {}
    older = _read_json(path / "quantize_config.json")  # AutoGPTQ's own file, before config.json had it
    found = config.get("quantization_config") or (older and {"quant_method": "gptq", **older})
    if found and not isinstance(found, dict):
        raise ModelLoadError(f"{path / 'config.json'}: quantization_config is not an object")
    return QuantizationConfig.of(found) if found else None


def unit_format(path: Path, quantization: str) -> WeightFormat | None:
    """Groups that a cut must not tear: GGUF's blocks, the kernels' groups, or those of what is quantised on load."""
    stored = grouped_format(read_quantization(path)) or WEIGHT_FORMATS.get(stored_format(path))
    made = ON_LOAD.get(quantization)
    return max((fmt for fmt in (stored, made) if fmt is not None), key=lambda fmt: fmt.group, default=None)


def read_layout(path: Path, topology: Topology, *, quantization: str, num_redundant_experts: int) -> ParallelLayout:
    """What each rank holds. Raises ModelLoadError, and ConfigError for a model that cannot be cut so."""
    return ParallelLayout.of(
        read_spec(path),
        topology,
        num_redundant_experts=num_redundant_experts,
        weights=unit_format(path, quantization),
    )


def model_len(spec: ModelSpec, wanted: int | None) -> int:
    """The longest sequence: the model's context, or less if wanted. Raises ConfigError for more."""
    if wanted is not None and not 1 <= wanted <= spec.max_position:
        raise ConfigError(
            f"max_model_len: {wanted} is not between 1 and the model's context of {spec.max_position}",
            param="max_model_len",
        )
    return wanted or spec.max_position


def _gguf_spec(path: Path) -> ModelSpec:
    header = read_gguf_header(path)
    spec = spec_from_gguf(header.metadata, frozenset(header.tensors))
    return replace(spec, rope=replace(spec.rope, frequency_factors=_frequency_factors(path, header)))


def _frequency_factors(path: Path, header: GgufHeader) -> tuple[float, ...]:
    tensor = header.tensors.get(_FACTORS)
    if tensor is None:
        return ()
    size = 4 * prod(tensor.shape)
    if tensor.storage != Storage.F32 or len(tensor.shape) != 1 or tensor.offset + size > path.stat().st_size:
        raise ModelLoadError(f"{path}: tensor {_FACTORS} is not {list(tensor.shape)} values of F32")
    values = numpy.fromfile(path, dtype="<f4", count=tensor.shape[0], offset=tensor.offset)
    return tuple(values.astype(float).tolist())


def _folder_spec(folder: Path) -> ModelSpec:
    config = _read_json(folder / "config.json")
    if config is None:
        raise ModelLoadError(f"{folder}: no config.json (expected a Hugging Face model folder or a .gguf file)")
    read_quantization(folder)  # refuses what cannot be read
    generation = _read_json(folder / "generation_config.json") or {}
    return spec_from_hf(config, generation)


def _read_json(path: Path) -> dict[str, Any] | None:
    if not path.is_file():
        return None
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ModelLoadError(f"{path}: not JSON: {error}") from error
    if not isinstance(found, dict):
        raise ModelLoadError(f"{path}: not a JSON object")
    return cast("dict[str, Any]", found)
