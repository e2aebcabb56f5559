"""Tensors whose shape only the sender knows, from rank to rank."""

import torch
from torch import Tensor

from .collectives import Collectives, Pending

_TYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32)
_MAX_DIMS = 6


def send_tensor(group: Collectives, x: Tensor, dst: int) -> Pending:
    """Start to send type, shape and x to a rank that calls ``recv_tensor``. Raises RankLostError."""
    if x.dtype not in _TYPES or x.dim() > _MAX_DIMS:
        raise ValueError(f"cannot send {x.dtype} with {x.dim()} dimensions")
    head = [_TYPES.index(x.dtype), x.dim(), *x.shape]
    group.send(torch.tensor(head + [0] * (2 + _MAX_DIMS - len(head)), device=x.device), dst).wait()
    return group.send(x, dst)


def recv_tensor(group: Collectives, src: int, device: torch.device) -> Tensor:
    """The next tensor of rank ``src``. Raises RankLostError."""
    head = torch.empty(2 + _MAX_DIMS, dtype=torch.int64, device=device)
    group.recv(head, src)
    kind, num_dims, *shape = head.tolist()
    x = torch.empty(shape[:num_dims], dtype=_TYPES[kind], device=device)
    group.recv(x, src)
    return x
