"""Which engines take part in ``bench engine``, with which settings."""

import os
import sys
from argparse import Namespace
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ...cluster.errors import ConfigError
from .checkpoint import as_folder
from .contender import Contender

LLAMA_DTYPES = ("fp32", "fp16", "q8_0", "q4_0", "q4_1", "file")
PEERS = ("transformers", "llama.cpp", "vllm")
WARMROOT = "warmroot"


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A contender before its process is started. ``name`` is engine and precision."""

    name: str
    module: str
    settings: dict[str, Any]
    python: str = sys.executable

    @property
    def is_ours(self) -> bool:
        """Whether it is the engine of this package."""
        return self.module == "warmroot_peer"

    def start(self, **changed: Any) -> Contender:
        """Start it, with changed settings. Raises ContenderError."""
        return Contender(self.name, self.module, {**self.settings, **changed}, self.python)


def lineup(options: Namespace, model: Path, scratch: Path) -> list[Entry]:
    """Ours first, one per precision, then the peers. Raises ConfigError when a peer that was asked for is missing."""
    common = {
        "threads": options.threads,
        "max_num_seqs": options.max_num_seqs,
        "max_model_len": options.max_model_len,
        "seed": options.seed,
    }
    entries = [
        Entry(
            name=f"{WARMROOT} {dtype}",
            module="warmroot_peer",
            settings={**common, "model": str(model), "dtype": dtype, "num_kv_blocks": None},
        )
        for dtype in options.dtype
    ]
    build = {"transformers": _transformers, "llama.cpp": _llama_cpp, "vllm": _vllm}
    for peer in _wanted(options):
        entries += build[peer](options, common, model, scratch)
    return entries


def start_all(entries: list[Entry], stack: ExitStack, note: Callable[[str], None]) -> list[Contender]:
    """Start every contender; ``stack`` ends them."""
    contenders: list[Contender] = []
    for entry in entries:
        note(f"starting {entry.name}")
        contender = entry.start()
        stack.callback(contender.close)
        contenders.append(contender)
    return contenders


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
    return [Entry(name="transformers fp32", module="transformers_peer", settings=settings)]


def _llama_cpp(options: Namespace, common: dict[str, Any], model: Path, scratch: Path) -> list[Entry]:
    if model.suffix != ".gguf":
        raise ConfigError("--peers: llama.cpp needs a model in a GGUF file", param="peers")
    return [
        Entry(
            name=f"llama.cpp {dtype}",
            module="llama_cpp_peer",
            settings={**common, "dtype": dtype, "weights": str(model), "scratch": str(scratch), "kv_unified": False},
            python=_interpreter(options.llama_python),
        )
        for dtype in options.llama_dtype
    ]


def _vllm(options: Namespace, common: dict[str, Any], model: Path, scratch: Path) -> list[Entry]:
    settings = {
        **common,
        "dtype": options.vllm_dtype,
        "model_dir": str(as_folder(model, scratch)),
        "compiled": not options.vllm_eager,
        "prefix_caching": True,
    }
    name = f"vllm {options.vllm_dtype}{' eager' if options.vllm_eager else ''}"
    return [Entry(name=name, module="vllm_peer", settings=settings, python=_interpreter(options.vllm_python))]


def _interpreter(path: str | None) -> str:
    """Absolute, links kept: a virtual environment is found by the path of its link."""
    if path is None:
        return sys.executable
    if not os.access(path, os.X_OK):
        raise ConfigError(f"{path}: no Python interpreter", param="peers")
    return os.path.abspath(path)
