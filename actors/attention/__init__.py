"""Attention behind one interface, with flash-attention's contract."""

from typing import TYPE_CHECKING

import torch

from ..kernels.library import native

if TYPE_CHECKING:
    from .interface import AttentionBackend, LatentBackend


def make_backend(device: torch.device, dtype: torch.dtype | None = None) -> "AttentionBackend":
    """The backend for a device and dtype of activations: flash-attention for half precision on CUDA, the native kernels
    for float32 on a CPU where they were built, plain torch otherwise.

    Raises ConfigError when the device needs a package that is not installed.
    """
    if device.type == "cuda" and (dtype is None or dtype.itemsize == 2):
        from .flash_backend import FlashAttention

        return FlashAttention()
    if device.type == "cpu" and dtype in (None, torch.float32) and native() is not None:
        from .native_backend import NativeAttention

        return NativeAttention()
    from .torch_backend import TorchAttention

    return TorchAttention()


def make_latent_backend(device: torch.device, dtype: torch.dtype) -> "LatentBackend":
    """The backend of models that cache latents: the native kernels for float32 on a CPU, plain torch otherwise."""
    if device.type == "cpu" and dtype == torch.float32 and native() is not None:
        from .native_latent import NativeLatentAttention

        return NativeLatentAttention()
    from .latent import TorchLatentAttention

    return TorchLatentAttention()
