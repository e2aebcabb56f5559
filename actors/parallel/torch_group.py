"""A group over torch.distributed: gloo between CPUs, NCCL between GPUs.

The backends' process groups are made directly from a store, not by ``init_process_group``: so a process may have
several groups and none that is global, only a group's members have to be there, and gloo can be told which of the
machine's addresses to use.
"""

import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Store

from ...cluster.errors import RankLostError
from .collectives import Pending
from .traffic import Kind, Traffic

_T = TypeVar("_T")


class TorchGroup:
    """``Collectives`` over a process group of torch. ``names`` say in errors who the ranks are, such as "rank 3"."""

    def __init__(self, backend: Any, names: Sequence[str], device: torch.device, traffic: Traffic) -> None:
        self.rank: int = backend.rank()
        self.size: int = backend.size()
        self.device = device
        self.names = names
        self.traffic = traffic
        self._open_backend: Any = backend

    @property
    def _backend(self) -> Any:
        if self._open_backend is None:
            raise RankLostError("this rank has left its group")
        return self._open_backend

    def all_reduce(self, x: Tensor) -> None:
        """See ``Collectives``. Bits are equal on all ranks, but the order of the sum is the backend's."""
        self._run("all_reduce", x.nbytes, lambda: self._backend.allreduce([x])).wait()

    def all_gather(self, x: Tensor) -> Tensor:
        """See ``Collectives``."""
        out = x.new_empty((self.size, *x.shape))
        x = x.contiguous()
        self._run("all_gather", x.nbytes, lambda: self._backend.allgather([list(out.unbind(0))], [x])).wait()
        return out

    def gather(self, x: Tensor, dst: int) -> Tensor | None:
        """See ``Collectives``."""
        out = x.new_empty((self.size, *x.shape)) if self.rank == dst else None
        x, options = x.contiguous(), dist.GatherOptions()
        options.rootRank = dst
        parts = [] if out is None else [list(out.unbind(0))]
        num_given = 0 if self.rank == dst else x.nbytes
        self._run("all_gather", num_given, lambda: self._backend.gather(parts, [x], options)).wait()
        return out

    def broadcast(self, x: Tensor, src: int) -> None:
        """See ``Collectives``."""
        options = dist.BroadcastOptions()
        options.rootRank = src
        self._run("broadcast", x.nbytes, lambda: self._backend.broadcast([x], options)).wait()

    def send(self, x: Tensor, dst: int) -> Pending:
        """See ``Collectives``."""
        x = x.contiguous()
        return self._run("hop", x.nbytes, lambda: self._backend.send([x], dst, 0), peer=dst, keep=x)

    def recv(self, x: Tensor, src: int) -> None:
        """See ``Collectives``."""
        self.start_recv(x, src).wait()

    def start_recv(self, x: Tensor, src: int) -> Pending:
        """See ``Collectives``."""
        return _Work(
            self, "hop", src, self._guarded("hop", src, lambda: self._backend.recv([x], src, 0)), x, gives=False
        )

    def exchange_counts(self, counts: Sequence[int]) -> list[int]:
        """See ``Collectives``."""
        mine = torch.tensor(counts, dtype=torch.int64, device=self.device)
        theirs = torch.empty_like(mine)
        self._run(
            "counts", mine.nbytes - mine.itemsize, lambda: self._backend.alltoall_base(theirs, mine, [], [])
        ).wait()
        return theirs.tolist()

    def all_to_all(self, rows: Tensor, send_counts: Sequence[int], out: Tensor, recv_counts: Sequence[int]) -> Pending:
        """See ``Collectives``."""
        row_bytes = rows.itemsize * rows.shape[1:].numel()
        num_sent = sum(send_counts) - send_counts[self.rank]
        return self._run(
            "all_to_all",
            num_sent * row_bytes,
            lambda: self._backend.alltoall_base(out, rows, list(recv_counts), list(send_counts)),
            keep=(rows, out),
        )

    def barrier(self) -> None:
        """See ``Collectives``."""
        flag = torch.zeros(1, device=self.device)
        self._guarded("barrier", None, lambda: self._backend.allreduce([flag]).wait())
        flag.item()  # a GPU's work is only queued until then

    def close(self) -> None:
        """See ``Collectives``. Idempotent."""
        if self._open_backend is not None:
            self._open_backend.shutdown()
            self._open_backend = None  # gloo disconnects when nobody holds it any more

    def _run(
        self, kind: Kind, num_bytes: int, start: Callable[[], Any], peer: int | None = None, keep: Any = None
    ) -> "_Work":
        self.traffic.add(kind, num_bytes)
        return _Work(self, kind, peer, self._timed(kind, peer, start), keep, gives=True)

    def _timed(self, kind: Kind, peer: int | None, call: Callable[[], _T]) -> _T:
        began = time.perf_counter()
        try:
            return self._guarded(kind, peer, call)
        finally:
            self.traffic.spend(kind, time.perf_counter() - began)

    def _guarded(self, operation: str, peer: int | None, call: Callable[[], _T]) -> _T:
        try:
            return call()
        except RuntimeError as error:  # what gloo and NCCL raise when a peer is gone or late
            others = [name for rank, name in enumerate(self.names) if rank != self.rank]
            who = self.names[peer] if peer is not None else " or ".join(others)
            raise RankLostError(f"{operation}: lost {who}: {str(error).splitlines()[0]}") from error


class _Work:
    """``Pending`` of one of torch's operations; keeps its tensors alive."""

    def __init__(
        self, group: TorchGroup, operation: Kind, peer: int | None, work: Any, keep: Any, *, gives: bool
    ) -> None:
        """Unless it ``gives`` something to others, waiting for it is not counted as communication."""
        self._call = group._timed if gives else group._guarded
        self._operation: Kind = operation
        self._peer = peer
        self._work = work
        self._keep = keep

    def wait(self) -> None:
        """See ``Pending``."""
        self._call(self._operation, self._peer, self._work.wait)


def gloo_transport(address: str) -> Any:
    """TCP at this machine's ``address``, which its peers must be able to reach. Groups may share it."""
    return dist.ProcessGroupGloo.create_device(hostname=address)


def gloo_group(
    store: Store, rank: int, names: Sequence[str], *, transport: Any, deadline_s: float, traffic: Traffic
) -> TorchGroup:
    """Join over a ``gloo_transport``. ``store`` is the group's own (a PrefixStore).

    Raises RankLostError if a peer does not join before the deadline.
    """
    options = dist.ProcessGroupGloo._Options()  # pyright: ignore[reportAttributeAccessIssue]
    options._devices = [transport]
    options._timeout = timedelta(seconds=deadline_s)
    try:
        backend = dist.ProcessGroupGloo(store, rank, len(names), options)
    except RuntimeError as error:
        raise RankLostError(f"joining a group of {', '.join(names)}: {str(error).splitlines()[0]}") from error
    return TorchGroup(backend, names, torch.device("cpu"), traffic)


def nccl_group(
    store: Store, rank: int, names: Sequence[str], *, device: torch.device, deadline_s: float, traffic: Traffic
) -> TorchGroup:
    """Join with a GPU. NCCL's own watchdog ends the process when an operation misses the deadline."""
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=deadline_s)
    torch.cuda.set_device(device)
    return TorchGroup(dist.ProcessGroupNCCL(store, rank, len(names), options), names, device, traffic)
