"""Arrays that the host fills, and the tensors that the device reads."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

Int32s = npt.NDArray[np.int32]
Int64s = npt.NDArray[np.int64]


def to_device(values: Sequence[float], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """[N], without waiting for what the device has queued."""
    on_host = device.type == "cpu"
    tensor = torch.tensor(values, dtype=dtype, pin_memory=not on_host)
    return tensor if on_host else tensor.to(device, non_blocking=True)


class Mirror:
    """An array and its tensor. On a CPU they share their memory; elsewhere ``upload`` copies."""

    __slots__ = ("_host", "array", "tensor")

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        """Zeros."""
        on_host = device.type == "cpu"
        # Only from pinned memory does a copy not hold the host up.
        self._host = torch.zeros(shape, dtype=dtype, pin_memory=not on_host)
        self.array: np.ndarray = self._host.numpy()
        self.tensor = self._host if on_host else self._host.to(device)

    def upload(self) -> None:
        """Start the copy. The array must not change before the device has done what was queued after it."""
        if self.tensor is not self._host:
            self.tensor.copy_(self._host, non_blocking=True)
