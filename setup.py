"""The native kernels: one shared library per instruction set, of which the best is chosen at run time.

They are optional: without a compiler the package installs all the same, and everything runs in torch. Further compiler
flags come from CXXFLAGS (the sanitizers of ``make kernels-sanitized`` do).
"""

import platform
from pathlib import Path

from setuptools import Extension, setup

_PACKAGE = Path("src/warmroot/actors/kernels")
_X86 = platform.machine().lower() in ("x86_64", "amd64")
_AVX2 = ["-mavx2", "-mfma", "-mf16c"]
_AVX512 = [f"-mavx512{part}" for part in ("f", "bw", "vl", "dq", "vnni")]
# GCC 12 takes its own AVX-512 headers for reads of what was never written.
_WARNINGS = ["-Wall", "-Wextra", "-Wno-uninitialized", "-Wno-maybe-uninitialized"]
_INSTRUCTIONS: dict[str, list[str]] = {
    "generic": [],
    **({"avx2": _AVX2, "avx512": [*_AVX2, *_AVX512, "-mprefer-vector-width=512"]} if _X86 else {}),
}


def _library(name: str, flags: list[str]) -> Extension:
    return Extension(
        f"warmroot.actors.kernels._{name}",
        sources=sorted(str(path) for path in (_PACKAGE / "native").glob("*.cpp")),
        depends=sorted(str(path) for path in (_PACKAGE / "native").glob("*.h")),
        extra_compile_args=["-std=c++20", "-O3", "-fvisibility=default", "-ffp-contract=fast", *_WARNINGS, *flags],
        extra_link_args=["-pthread"],
        optional=True,
    )


setup(ext_modules=[_library(name, flags) for name, flags in _INSTRUCTIONS.items()])
