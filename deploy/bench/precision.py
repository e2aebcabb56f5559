"""Precisions by the names that the bench gives them, and GGUF files in them."""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import gguf

from ...cluster.weight_formats import ON_LOAD
from .contender import Contender

OURS = ("fp32", "fp16", "bf16", *ON_LOAD, "q8_0", "q4_0", "q4_1", "file")
"""Of our own contenders: what begins with int quantises at load, the last four are GGUF tensors used as packed."""
PACKED = ("q8_0", "q4_0", "q4_1", "file")
LLAMA = ("fp32", "fp16", "bf16", "q8_0", "q4_0", "q4_1", "file")
VLLM = ("fp32", "fp16", "bf16")

_BITS = {"fp32": 32, "fp16": 16, "bf16": 16, "int8": 8, "q8_0": 8}
_FILE_TYPES = {0: "fp32", 1: "fp16", 2: "q4_0", 3: "q4_1", 7: "q8_0", 14: "q4_k_s", 15: "q4_k_m", 32: "bf16"}
"""``general.file_type`` of GGUF, llama.cpp's ``llama_ftype``."""


def bits(precision: str) -> int:
    """The class in which a precision is compared: 32, 16, 8 or 4 bits a weight, roughly."""
    return _BITS.get(precision, 4)


def named(precision: str, model: Path) -> str:
    """The precision itself, or what a GGUF file is if it is to be taken as it is."""
    return file_precision(model) if precision == "file" else precision


def file_precision(model: Path) -> str:
    """What most weights of a GGUF file are; "file" if it does not say so."""
    field = gguf.GGUFReader(model).get_field("general.file_type")
    return "file" if field is None else _FILE_TYPES.get(int(field.contents()), "file")


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufCopy:
    """A GGUF file in some precision: the source itself if it is that already, else made by llama.cpp's quantiser."""

    source: Path
    precision: str
    scratch: Path
    python: str = sys.executable
    """Interpreter that has llama-cpp-python."""

    def path(self, note: Callable[[str], None]) -> Path:
        """The file, which is made on the first call and kept under ``scratch``. Raises ContenderError."""
        if self.precision in ("file", file_precision(self.source)):
            return self.source
        target = self.scratch / f"{self.source.stem}.{self.precision}.gguf"
        if not target.exists():
            note(f"converting {self.source.name} to {self.precision}")
            kind = next(number for number, name in _FILE_TYPES.items() if name == self.precision)
            settings = {"threads": 1, "source": str(self.source), "target": str(target.absolute()), "file_type": kind}
            Contender("llama.cpp's quantiser", "llama_cpp_quantise", settings, self.python).close()
        return target
