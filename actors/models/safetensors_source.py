"""Checkpoints in safetensors files: one, or shards listed in ``model.safetensors.index.json``.

Linears may be quantised as GPTQ or AWQ tools store them; they are still known by the names of their weights.
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from ...cluster.damaged import reading
from ...cluster.errors import ModelLoadError
from ...cluster.quantization_config import QuantizationConfig
from ..layers.grouped import GroupedWeight
from .awq import awq_shape, read_awq
from .gptq import gptq_shape, read_gptq
from .tensors import Part, Shape, slices
from .weights import CODES

_INDEX = "model.safetensors.index.json"
_PREFIXES = ("model.", "language_model.model.", "model.language_model.", "")
"""What stands before ``embed_tokens``: a causal model, a multimodal one (two layouts), a bare decoder."""
_FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class SafetensorsSource:
    """A folder's memory-mapped tensors. ``quantization`` is what its config.json says of them.

    Raises ModelLoadError if there is no checkpoint, or a file is missing or damaged.
    """

    def __init__(self, folder: Path, quantization: QuantizationConfig | None = None) -> None:
        self._folder = folder
        self._quantization = quantization
        self._handles: dict[str, Any] = {}
        self._files = self._index()
        self._prefix = self._find_prefix()

    @property
    def dtype(self) -> torch.dtype:
        """See ``WeightSource.dtype``."""
        name = self._stored("model.embed_tokens.weight")
        return _FLOATS[self._slice(name).get_dtype()]

    @property
    def files(self) -> tuple[Path, ...]:
        """See ``WeightSource.files``."""
        return tuple(self._folder / name for name in sorted(set(self._files.values())))

    def where(self, name: str) -> str:
        """See ``WeightSource.where``."""
        stored = self._stored(name)
        return str(self._folder / self._files.get(stored, self._files.get(self._module(name) + ".qweight", "")))

    def shape(self, name: str) -> Shape | None:
        """See ``WeightSource.shape``."""
        stored = self._stored(name)
        if stored in self._files:
            return tuple(self._slice(stored).get_shape())
        if not self._is_grouped(name):
            return None
        codes = tuple(self._slice(self._module(name) + ".qweight").get_shape())
        assert self._quantization is not None
        return awq_shape(codes) if self._quantization.quant_method == "awq" else gptq_shape(self._quantization, codes)

    def read(self, name: str, part: Part | None = None) -> torch.Tensor:
        """See ``WeightSource.read``: of a part no other bytes are read."""
        grouped = self.read_grouped(name, part)
        if grouped is not None:
            return grouped.dequantise()
        tensor_slice = self._slice(self._stored(name))
        if tensor_slice.get_dtype() not in _FLOATS:
            raise ModelLoadError(
                f"{self.where(name)}: tensor {name} is stored as {tensor_slice.get_dtype()}, "
                f"expected one of {', '.join(_FLOATS)}"
            )
        return tensor_slice[:] if part is None else tensor_slice[slices(part)]

    def block_type(self, name: str) -> int | None:
        """See ``WeightSource.block_type``."""
        return CODES if self._is_grouped(name) else None

    def read_blocks(self, name: str, part: Part | None = None) -> torch.Tensor | None:
        """See ``WeightSource.read_blocks``."""
        raise ModelLoadError(f"{self.where(name)}: tensor {name} is not stored in blocks")

    @property
    def quantization(self) -> QuantizationConfig | None:
        """See ``WeightSource.quantization``."""
        return self._quantization

    def read_grouped(self, name: str, part: Part | None = None) -> GroupedWeight | None:
        """See ``WeightSource.read_grouped``."""
        if self._quantization is None or not self._is_grouped(name):
            return None
        read = read_awq if self._quantization.quant_method == "awq" else read_gptq
        whole = tuple(map(range, self.shape(name) or ()))
        try:
            return read(self._quantization, self._slice, self._module(name), part or whole)
        except (KeyError, ValueError, IndexError, RuntimeError, SafetensorError) as error:
            raise ModelLoadError(
                f"{self.where(name)}: {name} is not stored as {self._quantization.name}: {error}"
            ) from error

    def _is_grouped(self, name: str) -> bool:
        return self._quantization is not None and self._module(name) + ".qweight" in self._files

    def _module(self, name: str) -> str:
        return self._stored(name).removesuffix(".weight")

    def _index(self) -> dict[str, str]:
        """Tensor name -> file name."""
        index = self._folder / _INDEX
        if index.is_file():
            with reading(index):
                return _shards(json.loads(index.read_text(encoding="utf-8"))["weight_map"])
        files = sorted(path.name for path in self._folder.glob("*.safetensors"))
        if not files:
            raise ModelLoadError(f"{self._folder}: no *.safetensors file and no {_INDEX}")
        return {name: file for file in files for name in list(self._open(file).keys())}

    def _find_prefix(self) -> str:
        for prefix in _PREFIXES:
            if prefix + "embed_tokens.weight" in self._files:
                return prefix
        raise ModelLoadError(f"{self._folder}: tensor model.embed_tokens.weight is missing from its safetensors files")

    def _stored(self, name: str) -> str:
        if name.startswith("model."):
            return self._prefix + name.removeprefix("model.")
        return "language_model." + name if self._prefix == "language_model.model." else name

    def _slice(self, stored: str) -> Any:
        file = self._files[stored]
        try:
            return self._open(file).get_slice(stored)
        except SafetensorError as error:
            raise ModelLoadError(f"{self._folder / file}: tensor {stored} cannot be read: {error}") from error

    def _open(self, file: str) -> Any:
        if file not in self._handles:
            path = self._folder / file
            try:
                self._handles[file] = safe_open(path, framework="pt")
            except (OSError, ValueError, SafetensorError) as error:
                raise ModelLoadError(f"{path}: cannot be read as safetensors: {error}") from error
        return self._handles[file]


def _shards(weight_map: dict[str, str]) -> dict[str, str]:
    """The map of an index, if all its files lie beside it. Raises ValueError."""
    for file in weight_map.values():
        if not file.endswith(".safetensors") or Path(file).name != file or "\0" in file:
            raise ValueError(f"{file!r:.80} is no safetensors file of this folder")
    return dict(weight_map)
