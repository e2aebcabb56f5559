"""A group of processes of one machine whose sums and gathers go through memory that they share.

The memory is a file without a name, passed from rank 0 to the others over a socket: when the last process ends, however
it ends, nothing is left behind.
"""

import ctypes
import os
import secrets
import socket
import struct
import time
from collections.abc import Sequence
from ctypes import byref, c_int32, c_int64, c_void_p
from typing import Literal

import torch
from torch import Tensor
from torch._C._distributed_c10d import Store

from ...cluster.errors import EngineError, RankLostError
from ..kernels.library import NativeLibrary
from .collectives import Collectives, Pending
from .traffic import Kind, Traffic

SLOT_BYTES = 2**20
"""What a rank contributes at a time; larger tensors go in several turns."""
SPIN_S = 100e-6
"""How long a rank waits actively: giving way to others all the while."""
_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_LATE, _GONE, _UNEQUAL = 1, 2, 3
_CREDENTIALS = struct.Struct("3i")


def can_share_memory(library: NativeLibrary | None) -> bool:
    """Whether this platform and ``library`` have what it needs."""
    return library is not None and hasattr(os, "memfd_create") and hasattr(library.functions, "wr_shm_spent_ns")


class SharedMemoryGroup:
    """``Collectives`` whose ``all_reduce``, ``all_gather`` and ``gather`` use shared memory, and the rest ``inner``.

    The sum is taken in float32 in the order of the ranks: the same bits on every rank and in every run.
    """

    def __init__(
        self,
        inner: Collectives,
        library: NativeLibrary,
        fd: int,
        names: Sequence[str],
        *,
        deadline_s: float,
        traffic: Traffic,
        slot_bytes: int = SLOT_BYTES,
    ) -> None:
        """``fd`` is a file of ``segment_bytes`` zeros, open in all ranks; it is owned from here on."""
        self.rank = inner.rank
        self.size = inner.size
        self.inner = inner
        self.traffic = traffic
        self._names = names
        self._deadline_s = deadline_s
        self._functions = _prototypes(library)
        self._spent_ns = 0
        self.handle: int | None = self._functions.wr_shm_open(
            fd, self.rank, self.size, slot_bytes, int(SPIN_S * 1e9), int(deadline_s * 1e9)
        )
        """``wr_shm_group *``, for native code that reduces by itself."""
        if self.handle is None:
            raise EngineError(f"cannot map memory that {', '.join(names)} share")

    def all_reduce(self, x: Tensor) -> None:
        """See ``Collectives``. float32, bfloat16 or float16 on the CPU."""
        kind = _TYPES.get(x.dtype)
        if kind is None or not x.is_contiguous():
            raise ValueError(f"all_reduce takes contiguous float tensors, not {x.dtype} with strides {x.stride()}")
        self.traffic.add("all_reduce", x.nbytes)
        peer = c_int32()
        self._check(
            "all_reduce",
            self._functions.wr_shm_all_reduce(self.open_handle(), x.data_ptr(), x.numel(), kind, byref(peer)),
            peer,
        )

    def all_gather(self, x: Tensor) -> Tensor:
        """See ``Collectives``."""
        out = x.new_empty((self.size, *x.shape))
        self._gather(x.contiguous(), out, x.nbytes)
        return out

    def gather(self, x: Tensor, dst: int) -> Tensor | None:
        """See ``Collectives``."""
        out = x.new_empty((self.size, *x.shape)) if self.rank == dst else None
        self._gather(x.contiguous(), out, 0 if self.rank == dst else x.nbytes)
        return out

    def _gather(self, x: Tensor, out: Tensor | None, num_given: int) -> None:
        self.traffic.add("all_gather", num_given)
        peer = c_int32()
        target = None if out is None else out.data_ptr()
        self._check(
            "all_gather",
            self._functions.wr_shm_all_gather(self.open_handle(), x.data_ptr(), x.nbytes, target, byref(peer)),
            peer,
        )

    def barrier(self) -> None:
        """See ``Collectives``."""
        peer = c_int32()
        self._check("barrier", self._functions.wr_shm_all_reduce(self.open_handle(), None, 0, 0, byref(peer)), peer)

    def broadcast(self, x: Tensor, src: int) -> None:
        """See ``Collectives``."""
        self.inner.broadcast(x, src)

    def send(self, x: Tensor, dst: int) -> Pending:
        """See ``Collectives``."""
        return self.inner.send(x, dst)

    def recv(self, x: Tensor, src: int) -> None:
        """See ``Collectives``."""
        self.inner.recv(x, src)

    def start_recv(self, x: Tensor, src: int) -> Pending:
        """See ``Collectives``."""
        return self.inner.start_recv(x, src)

    def exchange_counts(self, counts: Sequence[int]) -> list[int]:
        """See ``Collectives``."""
        return self.inner.exchange_counts(counts)

    def all_to_all(self, rows: Tensor, send_counts: Sequence[int], out: Tensor, recv_counts: Sequence[int]) -> Pending:
        """See ``Collectives``."""
        return self.inner.all_to_all(rows, send_counts, out, recv_counts)

    def close(self) -> None:
        """See ``Collectives``. Idempotent."""
        if self.handle is not None:
            self._functions.wr_shm_close(self.handle)
            self.handle = None
            self.inner.close()

    def settle(self, fault: int, peer: c_int32, num_calls: int, num_bytes: int) -> None:
        """Count the sums of ``num_bytes`` each that native code has made. Raises what ``all_reduce`` would."""
        self.traffic.add("all_reduce", num_bytes, num_calls)
        self._check("all_reduce", fault, peer)

    def open_handle(self) -> int:
        """``handle``. Raises RankLostError when the group is closed."""
        if self.handle is None:
            raise RankLostError("this rank has left its group")
        return self.handle

    def _check(self, operation: Kind | Literal["barrier"], fault: int, peer: c_int32) -> None:
        if operation != "barrier":
            before, self._spent_ns = self._spent_ns, self._functions.wr_shm_spent_ns(self.open_handle())
            self.traffic.spend(operation, (self._spent_ns - before) * 1e-9)
        if not fault:
            return
        name = self._names[peer.value]
        if fault == _GONE:
            raise RankLostError(f"{operation}: {name} is gone")
        if fault == _LATE:
            raise RankLostError(f"{operation}: {name} did not come within {self._deadline_s:g} s")
        raise EngineError(f"{operation}: {name} came with another number of bytes")


def share_file(store: Store, rank: int, size: int, num_bytes: int, *, deadline_s: float) -> int:
    """A descriptor of one file of ``num_bytes`` zeros that all ranks get. ``store`` is the group's own.

    Raises RankLostError if a rank does not come before the deadline.
    """
    end = time.monotonic() + deadline_s
    try:
        return _offer(store, size, num_bytes, end) if rank == 0 else _accept(store, end)
    except (OSError, RuntimeError) as error:
        raise RankLostError(f"sharing memory between {size} ranks: {error}") from error


def _offer(store: Store, size: int, num_bytes: int, end: float) -> int:
    fd = os.memfd_create("warmroot", os.MFD_CLOEXEC)
    try:
        os.ftruncate(fd, num_bytes)
        with socket.socket(socket.AF_UNIX) as listener:
            # An abstract name: it leaves no file. Who may connect is decided by what the peer's kernel says he is.
            name = f"\0warmroot-{secrets.token_hex(16)}"
            listener.bind(name)
            listener.listen(size)
            store.set("socket", name)
            for _ in range(size - 1):
                _hand_over(listener, fd, end)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _hand_over(listener: socket.socket, fd: int, end: float) -> None:
    while True:
        listener.settimeout(max(0.0, end - time.monotonic()))
        peer, _ = listener.accept()
        with peer:
            credentials = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
            if _CREDENTIALS.unpack(credentials)[1] == os.getuid():
                socket.send_fds(peer, [b"\0"], [fd])
                return


def _accept(store: Store, end: float) -> int:
    name = store.get("socket").decode()
    with socket.socket(socket.AF_UNIX) as peer:
        peer.settimeout(max(0.0, end - time.monotonic()))
        peer.connect(name)
        _, fds, _, _ = socket.recv_fds(peer, 1, 1)
    if not fds:
        raise OSError("rank 0 has closed the connection")
    return fds[0]


def segment_bytes(library: NativeLibrary, size: int, slot_bytes: int = SLOT_BYTES) -> int:
    """Size of the file that ``size`` ranks share."""
    return int(_prototypes(library).wr_shm_bytes(size, slot_bytes))


def _prototypes(library: NativeLibrary) -> ctypes.CDLL:
    functions: ctypes.CDLL = library.functions
    functions.wr_shm_bytes.argtypes = [c_int32, c_int64]
    functions.wr_shm_bytes.restype = c_int64
    functions.wr_shm_open.argtypes = [c_int32, c_int32, c_int32, c_int64, c_int64, c_int64]
    functions.wr_shm_open.restype = c_void_p
    functions.wr_shm_all_reduce.argtypes = [c_void_p, c_void_p, c_int64, c_int32, c_void_p]
    functions.wr_shm_all_gather.argtypes = [c_void_p, c_void_p, c_int64, c_void_p, c_void_p]
    functions.wr_shm_spent_ns.argtypes = [c_void_p]
    functions.wr_shm_spent_ns.restype = c_int64
    functions.wr_shm_close.argtypes = [c_void_p]
    functions.wr_shm_close.restype = None
    return functions
