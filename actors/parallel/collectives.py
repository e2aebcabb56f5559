"""What layers need of the ranks they share work with, whatever carries it."""

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor


class Pending(Protocol):
    """An operation under way. Its tensors must be left alone until ``wait``."""

    def wait(self) -> None:
        """Return when it is done. Raises RankLostError."""
        ...


class Collectives(Protocol):
    """A group of ranks. All of them call the same operations in the same order, with equal shapes and types.

    Ranks are counted within the group. Every operation raises RankLostError, naming peer and operation, when a peer is
    gone or the group's deadline passes; the group is of no use after that. Not thread-safe.
    """

    @property
    def rank(self) -> int:
        """Of this process, in the group."""
        ...

    @property
    def size(self) -> int:
        """Number of ranks."""
        ...

    def all_reduce(self, x: Tensor) -> None:
        """Replace x by the sum of all ranks' x. Contiguous. The same bits on every rank."""
        ...

    def all_gather(self, x: Tensor) -> Tensor:
        """[...] -> [size, ...]: every rank's x, in the order of the ranks."""
        ...

    def gather(self, x: Tensor, dst: int) -> Tensor | None:
        """``all_gather`` for rank ``dst`` only; None on the others."""
        ...

    def broadcast(self, x: Tensor, src: int) -> None:
        """Overwrite x with rank ``src``'s x. Contiguous."""
        ...

    def send(self, x: Tensor, dst: int) -> Pending:
        """Start to send x to a rank that calls ``recv`` with the same shape and type."""
        ...

    def recv(self, x: Tensor, src: int) -> None:
        """Overwrite x with the next tensor that rank ``src`` sends here. Contiguous."""
        ...

    def start_recv(self, x: Tensor, src: int) -> Pending:
        """``recv`` in the background, in the order of the calls: what is awaited early travels while others compute."""
        ...

    def exchange_counts(self, counts: Sequence[int]) -> list[int]:
        """counts[r] is for rank r; returns what each rank has for this one."""
        ...

    def all_to_all(self, rows: Tensor, send_counts: Sequence[int], out: Tensor, recv_counts: Sequence[int]) -> Pending:
        """Start to send ``rows`` [sum(send_counts), ...], the first send_counts[0] of them to rank 0 and so on.

        ``out`` [sum(recv_counts), ...] gets what the ranks send here, in the order of the ranks. Both contiguous.
        """
        ...

    def barrier(self) -> None:
        """Return when all ranks have called it."""
        ...

    def close(self) -> None:
        """Leave the group. Peers that wait for this rank get RankLostError."""
        ...
