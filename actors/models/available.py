"""Which kernels compute."""

import os

import torch

from ..kernels.library import VARIABLE, native


def cpu_kernels() -> str:
    """``avx512``, ``avx2`` or ``generic``; ``torch (no native kernels: why)`` without them. Raises ConfigError."""
    library = native()
    if library is not None:
        return library.name
    why = f"switched off by {VARIABLE}" if os.environ.get(VARIABLE) == "off" else "they were not built"
    return f"torch (no native kernels: {why})"


def kernels_on(device: torch.device) -> str:
    """Those of the CPU, or a GPU's. Raises ConfigError."""
    return cpu_kernels() if device.type == "cpu" else device.type
