"""Attention behind one interface, with flash-attention's contract."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from .interface import AttentionBackend


def make_backend(device: "torch.device", dtype: "torch.dtype | None" = None) -> "AttentionBackend":
    """The backend for a device: flash-attention on CUDA, plain torch elsewhere and for float32.

    Raises ConfigError when the device needs a package that is not installed.
    """
    if device.type == "cuda" and (dtype is None or dtype.itemsize == 2):
        from .flash_backend import FlashAttention

        return FlashAttention()
    from .torch_backend import TorchAttention

    return TorchAttention()
