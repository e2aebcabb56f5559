"""Finds and loads the native library that suits this machine."""

import ctypes
import os
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ...cluster.errors import ConfigError

VARIABLE = "WARMROOT_KERNELS"
"""Environment variable that names the instructions to use: avx512, avx2, generic, or off."""
FOLDER_VARIABLE = "WARMROOT_KERNELS_DIR"
"""Environment variable that names a folder to take the libraries from, such as those built with sanitizers."""
_NAMES = ("avx512", "avx2", "generic")


class NativeLibrary:
    """The C functions of ``native/warmroot.h``. They release the GIL."""

    def __init__(self, name: str, path: str) -> None:
        self.name = name
        """Instructions it is compiled for."""
        self.functions: Any = ctypes.CDLL(path)
        self.set_num_threads(_default_threads())

    def set_num_threads(self, num_threads: int) -> None:
        """Threads of every kernel of this process, the calling one included. Not while a kernel runs."""
        self.functions.wr_set_num_threads(ctypes.c_int32(num_threads))

    @property
    def num_threads(self) -> int:
        """Threads that take part in a kernel."""
        return int(self.functions.wr_num_threads())


@lru_cache(maxsize=1)
def native() -> NativeLibrary | None:
    """The library for this machine; None where there is none or it is switched off.

    Raises ConfigError if the environment asks for one that is not there.
    """
    wanted = os.environ.get(VARIABLE, "")
    if wanted == "off":
        return None
    if wanted and wanted not in _NAMES:
        raise ConfigError(f"{VARIABLE}: {wanted!r} is not one of {', '.join(_NAMES)}, off", param=VARIABLE)
    name = wanted or _best()
    path = None if name is None else _path(name)
    if name is None or path is None:
        if wanted:
            raise ConfigError(f"{VARIABLE}: the {wanted} kernels were not built for this machine", param=VARIABLE)
        return None
    return NativeLibrary(name, path)


def runnable() -> list[NativeLibrary]:
    """All that are built and that this machine can run, the best first."""
    best = _best()
    names = () if best is None else _NAMES[_NAMES.index(best) :]
    return [NativeLibrary(name, path) for name in names if (path := _path(name)) is not None]


def _default_threads() -> int:
    """As torch's: OMP_NUM_THREADS, or the cores that this process may use."""
    wanted = os.environ.get("OMP_NUM_THREADS", "")
    if wanted.isdecimal() and int(wanted) > 0:
        return int(wanted)
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _best() -> str | None:
    path = _path("generic")
    if path is None:
        return None
    ask = ctypes.CDLL(path).wr_best_instructions
    ask.restype = ctypes.c_char_p
    best = ask().decode()
    return best if _path(best) is not None else "generic"


def _path(name: str) -> str | None:
    if folder := os.environ.get(FOLDER_VARIABLE):
        return next(map(str, Path(folder).glob(f"_{name}.*")), None)
    spec = find_spec(f"{__package__}._{name}")
    return None if spec is None else spec.origin
