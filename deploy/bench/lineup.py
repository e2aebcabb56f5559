"""Which engines take part in ``bench engine``, with which settings, and who runs against whom."""

import os
import sys
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ...cluster.errors import ConfigError
from ...cluster.weight_formats import ON_LOAD
from .checkpoint import as_folder
from .contender import Contender
from .precision import PACKED, GgufCopy, bits, named

PEERS = ("transformers", "llama.cpp", "vllm")
WARMROOT = "warmroot"


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A contender before its process is started."""

    engine: str
    """``warmroot`` or one of ``PEERS``."""
    precision: str
    module: str
    settings: dict[str, Any]
    python: str = sys.executable
    remark: str = ""
    gguf: GgufCopy | None = None
    """The file that it loads, if that may have to be made first."""

    @property
    def name(self) -> str:
        """Engine and precision."""
        return f"{self.engine} {self.precision}{self.remark}"

    @property
    def is_ours(self) -> bool:
        """Whether it is the engine of this package."""
        return self.engine == WARMROOT

    @property
    def bits(self) -> int:
        """Class of the precision."""
        return bits(self.precision)

    def start(
        self, note: Callable[[str], None], environment: Mapping[str, str] | None = None, **changed: Any
    ) -> Contender:
        """Start it, with changed settings and variables. Raises ContenderError."""
        weights = {} if self.gguf is None else {"model": str(self.gguf.path(note))}
        note(f"starting {self.name}")
        return Contender(self.name, self.module, {**self.settings, **weights, **changed}, self.python, environment)


@dataclass(frozen=True, slots=True)
class Heat:
    """Contenders of one precision class, which are started together and take turns."""

    bits: int
    entries: list[Entry]

    @property
    def name(self) -> str:
        """For the report."""
        return f"{self.bits}-bit"

    @property
    def ours(self) -> list[Entry]:
        """Those of this package."""
        return [entry for entry in self.entries if entry.is_ours]

    @property
    def peers(self) -> list[Entry]:
        """The others."""
        return [entry for entry in self.entries if not entry.is_ours]


def heats(entries: Sequence[Entry]) -> list[Heat]:
    """One per class in which we take part; peers of other classes go to the nearest.

    vLLM runs against our 16-bit weights in every precision. The 8-bit heat is last: it must beat whatever
    peer was fastest before.
    """
    classes = {entry.bits for entry in entries if entry.is_ours}
    order = sorted(classes, key=lambda size: (size == 8, -size))

    def runs(entry: Entry, size: int) -> bool:
        home = entry.bits if entry.bits in classes else min(classes, key=lambda other: abs(other - entry.bits))
        return size == home or (size == 16 and entry.engine == "vllm")

    return [Heat(size, [entry for entry in entries if runs(entry, size)]) for size in order]


def start_all(entries: Sequence[Entry], stack: ExitStack, note: Callable[[str], None]) -> list[Contender]:
    """Start every contender; ``stack`` ends them."""
    contenders: list[Contender] = []
    for entry in entries:
        contender = entry.start(note)
        stack.callback(contender.close)
        contenders.append(contender)
    return contenders


def lineup(options: Namespace, model: Path, scratch: Path) -> list[Entry]:
    """Ours first, one per precision, then the peers. Raises ConfigError when a peer that was asked for is missing."""
    common = {
        "threads": options.threads,
        "max_num_seqs": options.max_num_seqs,
        "max_model_len": options.max_model_len,
        "seed": options.seed,
    }
    entries = [our_entry(options, common, precision, model, scratch) for precision in options.dtype]
    build = {"transformers": _transformers, "llama.cpp": _llama_cpp, "vllm": _vllm}
    for peer in _wanted(options):
        entries += build[peer](options, common, model, scratch)
    return entries


def our_entry(options: Namespace, common: dict[str, Any], precision: str, model: Path, scratch: Path) -> Entry:
    """Our engine in one precision. Raises ConfigError."""
    if precision in PACKED and model.suffix != ".gguf":
        raise ConfigError(f"--dtype: {precision} needs a model in a GGUF file", param="dtype")
    precision = named(precision, model)
    return Entry(
        engine=WARMROOT,
        precision=precision,
        module="warmroot_peer",
        settings={**common, "model": str(model), "precision": precision, "num_kv_blocks": None},
        gguf=_gguf(options, precision, model, scratch) if bits(precision) <= 8 and precision not in ON_LOAD else None,
    )


def _gguf(options: Namespace, precision: str, model: Path, scratch: Path) -> GgufCopy:
    return GgufCopy(
        source=model, precision=precision, scratch=scratch, python=_interpreter(getattr(options, "llama_python", None))
    )


def _wanted(options: Namespace) -> list[str]:
    """The peers asked for; of "all", those that are installed."""
    installed = {
        "transformers": find_spec("transformers") is not None,
        "llama.cpp": options.llama_python is not None or find_spec("llama_cpp") is not None,
        "vllm": options.vllm_python is not None,
    }
    if options.peers == "none":
        return []
    if options.peers == "all":
        return [peer for peer in PEERS if installed[peer]]
    wanted = options.peers.split(",")
    for peer in wanted:
        if peer not in PEERS:
            raise ConfigError(f"--peers: {peer!r} is not one of {', '.join(PEERS)}", param="peers")
        if not installed[peer]:
            raise ConfigError(f"--peers: {peer} is not installed; see docs/benchmarks.md", param="peers")
    return wanted


def _transformers(options: Namespace, common: dict[str, Any], model: Path, scratch: Path) -> list[Entry]:
    settings = {**common, "dtype": "fp32", "model_dir": str(as_folder(model, scratch))}
    return [Entry(engine="transformers", precision="fp32", module="transformers_peer", settings=settings)]


def _llama_cpp(options: Namespace, common: dict[str, Any], model: Path, scratch: Path) -> list[Entry]:
    if model.suffix != ".gguf":
        raise ConfigError("--peers: llama.cpp needs a model in a GGUF file", param="peers")
    return [
        Entry(
            engine="llama.cpp",
            precision=precision,
            module="llama_cpp_peer",
            settings={**common, "dtype": precision, "kv_unified": False},
            python=_interpreter(options.llama_python),
            gguf=_gguf(options, precision, model, scratch),
        )
        for precision in dict.fromkeys(named(dtype, model) for dtype in options.llama_dtype)
    ]


def _vllm(options: Namespace, common: dict[str, Any], model: Path, scratch: Path) -> list[Entry]:
    compiled = not options.vllm_eager
    folder = str(as_folder(model, scratch))
    return [
        Entry(
            engine="vllm",
            precision=dtype,
            module="vllm_peer",
            settings={**common, "dtype": dtype, "model_dir": folder, "compiled": compiled, "prefix_caching": True},
            python=_interpreter(options.vllm_python),
            remark="" if compiled else " eager",
        )
        for dtype in options.vllm_dtype
    ]


def _interpreter(path: str | None) -> str:
    """Absolute, links kept: a virtual environment is found by the path of its link."""
    if path is None:
        return sys.executable
    if not os.access(path, os.X_OK):
        raise ConfigError(f"{path}: no Python interpreter", param="peers")
    return os.path.abspath(path)
