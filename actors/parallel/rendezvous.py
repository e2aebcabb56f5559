"""Where the ranks of a gang find each other while it starts."""

from datetime import timedelta

from torch._C._distributed_c10d import TCPStore

from ...cluster.errors import RankLostError


def serve_store(address: str, deadline_s: float) -> TCPStore:
    """Where the ranks of a gang find each other: made by rank 0, which announces ``address`` and the store's ``port``.

    Whoever can reach the port can disturb the gang's start: keep it inside the cluster's network.
    """
    return _store(address, 0, deadline_s, serves=True)


def join_store(address: str, port: int, deadline_s: float) -> TCPStore:
    """The store that rank 0 serves. Raises RankLostError if it cannot be reached before the deadline."""
    return _store(address, port, deadline_s, serves=False)


def _store(address: str, port: int, deadline_s: float, *, serves: bool) -> TCPStore:
    timeout = timedelta(seconds=deadline_s)
    try:
        return TCPStore(address, port, is_master=serves, timeout=timeout, wait_for_workers=False)
    except (RuntimeError, ValueError) as error:
        raise RankLostError(f"rank 0's store at {address}:{port}: {str(error).splitlines()[0]}") from error
