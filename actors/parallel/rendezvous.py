"""Where the ranks of a gang find each other while it starts."""

import socket
from datetime import timedelta

from torch._C._distributed_c10d import TCPStore

from ...cluster.errors import RankLostError


def serve_store(address: str, deadline_s: float) -> TCPStore:
    """Where the ranks of a gang find each other: made by rank 0, which announces ``address`` and the store's ``port``.

    It listens at that address only. Whoever can reach it can disturb the gang's start: keep it inside the cluster's
    network.
    """
    try:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        listening = socket.create_server((address, 0), family=family)
    except OSError as error:
        raise RankLostError(f"rank 0's store cannot listen at {address}: {error.strerror}") from error
    return _store(address, listening.getsockname()[1], deadline_s, listening)


def join_store(address: str, port: int, deadline_s: float) -> TCPStore:
    """The store that rank 0 serves. Raises RankLostError if it cannot be reached before the deadline."""
    return _store(address, port, deadline_s, None)


def _store(address: str, port: int, deadline_s: float, listening: socket.socket | None) -> TCPStore:
    timeout = timedelta(seconds=deadline_s)
    # The store would listen on every interface by itself; it owns the socket from now on.
    fd = None if listening is None else listening.detach()
    try:
        return TCPStore(
            address, port, is_master=fd is not None, timeout=timeout, wait_for_workers=False, master_listen_fd=fd
        )
    except (RuntimeError, ValueError) as error:
        raise RankLostError(f"rank 0's store at {address}:{port}: {str(error).splitlines()[0]}") from error
