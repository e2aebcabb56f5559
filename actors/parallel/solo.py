"""A group of one: nothing to send, nobody to wait for."""

from collections.abc import Sequence

from torch import Tensor

from .collectives import Pending


class Done:
    """An operation that was over when it was called."""

    def wait(self) -> None:
        """Return at once."""


class SoloGroup:
    """``Collectives`` of one rank, so that a layer need not ask whether it has peers."""

    rank = 0
    size = 1

    def all_reduce(self, x: Tensor) -> None:
        """The sum of one."""

    def all_gather(self, x: Tensor) -> Tensor:
        """[...] -> [1, ...], without a copy."""
        return x.unsqueeze(0)

    def gather(self, x: Tensor, dst: int) -> Tensor | None:
        """``all_gather``."""
        return self.all_gather(x)

    def broadcast(self, x: Tensor, src: int) -> None:
        """Nothing to do."""

    def send(self, x: Tensor, dst: int) -> Pending:
        """Raises ValueError: there is nobody."""
        raise ValueError("a group of one has nobody to send to")

    def recv(self, x: Tensor, src: int) -> None:
        """Raises ValueError: there is nobody."""
        raise ValueError("a group of one has nobody to receive from")

    def start_recv(self, x: Tensor, src: int) -> Pending:
        """Raises ValueError: there is nobody."""
        raise ValueError("a group of one has nobody to receive from")

    def exchange_counts(self, counts: Sequence[int]) -> list[int]:
        """The counts as they are."""
        return list(counts)

    def all_to_all(self, rows: Tensor, send_counts: Sequence[int], out: Tensor, recv_counts: Sequence[int]) -> Pending:
        """Copy the rows."""
        out.copy_(rows)
        return Done()

    def barrier(self) -> None:
        """All have come."""

    def close(self) -> None:
        """Nothing is held."""
