"""A connection between a gang's leader and a rank: frames of a 4-byte length over a Unix or TCP socket."""

import hmac
import logging
import secrets
import select
import selectors
import socket
import struct
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, cast

import msgpack  # pyright: ignore[reportMissingTypeStubs]

from ...cluster.errors import RankLostError
from ...router.wire import MAX_FRAME_BYTES, MAX_HELLO_BYTES, FrameDecoder, WireError

Purpose = Literal["plans", "pulse"]
_VERSION = 1
_RECV_BYTES = 2**16
_HELLO_S = 1.0
_WELCOME = b"welcome"
_RETRY_S = 0.05

logger = logging.getLogger(__name__)


def frame(body: bytes) -> bytes:
    """The body with its length in front."""
    return len(body).to_bytes(4, "big") + body


class Link:
    """Sends and receives frames. What it meets becomes a RankLostError that names ``peer``."""

    def __init__(
        self, connection: socket.socket, peer: str, *, deadline_s: float, limit: int = MAX_FRAME_BYTES
    ) -> None:
        connection.settimeout(None)
        # Without a timeout in Python, which would cost a poll per call; the kernel keeps the deadline.
        seconds = max(deadline_s, 1e-3)
        wait = struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, wait)
        self.peer = peer
        self._connection = connection
        self._decoder = FrameDecoder(limit)
        self._deadline_ms = 1e3 * deadline_s
        self._news, self._both = select.poll(), select.poll()
        self._news.register(connection, select.POLLIN)
        self._both.register(connection, select.POLLIN | select.POLLOUT)

    def fileno(self) -> int:
        """For selectors."""
        return self._connection.fileno()

    def send(self, framed: bytes) -> None:
        """Send what ``frame`` made."""
        try:
            self._connection.sendall(framed)
        except BlockingIOError:
            raise RankLostError(f"{self.peer} takes nothing any more") from None
        except OSError as error:
            raise RankLostError(f"{self.peer} is gone: {error}") from error

    def exchange(self, framed: bytes, receive: Callable[[], None]) -> None:
        """Send, and ``receive`` what comes while the peer takes nothing: it may wait for that in its turn."""
        rest = self._send_some(memoryview(framed))
        while rest:
            events = self._both.poll(self._deadline_ms)
            if not events:
                raise RankLostError(f"{self.peer} takes nothing any more")
            if events[0][1] & select.POLLIN:
                receive()
            rest = self._send_some(rest)

    def _send_some(self, rest: memoryview) -> memoryview:
        """What is left after the peer took what it could at once."""
        try:
            return rest[self._connection.send(rest, socket.MSG_DONTWAIT) :]
        except BlockingIOError:
            return rest
        except OSError as error:
            raise RankLostError(f"{self.peer} is gone: {error}") from error

    def has_news(self, wait_s: float) -> bool:
        """Whether ``receive`` would return, or raise, at once; waits up to ``wait_s`` for that."""
        return bool(self._news.poll(1e3 * wait_s))

    def receive(self) -> Iterator[bytes]:
        """Wait for bytes; the frames that they complete."""
        try:
            data = self._connection.recv(_RECV_BYTES)
        except OSError as error:
            raise RankLostError(f"{self.peer} is gone: {error}") from error
        if not data:
            raise RankLostError(f"{self.peer} has closed the connection")
        self._decoder.feed(data)
        return iter(self._next, None)

    def _next(self) -> bytes | None:
        try:
            return self._decoder.next()
        except WireError as error:
            raise RankLostError(f"{self.peer} sends nonsense: {error.message}") from error

    def shut(self) -> None:
        """Wake whoever sends or receives here, in any thread."""
        try:
            self._connection.shutdown(socket.SHUT_RDWR)
        except OSError:  # the peer was faster
            logger.debug("%s: already disconnected", self.peer)

    def close(self) -> None:
        """Release the socket."""
        self._connection.close()


@dataclass(frozen=True, slots=True)
class Hello:
    """Who connects, and what for."""

    rank: int
    purpose: Purpose


class Listener:
    """Accepts the connections of ranks that know ``token``.

    Listens at TCP ``host`` (port 0: any) and, where names without files exist, at a Unix socket for ranks of this host.
    """

    def __init__(self, token: str, host: str, port: int = 0) -> None:
        self._token = token
        self._sockets = [socket.create_server((host, port))]
        port = self._sockets[0].getsockname()[1]
        self.addresses: tuple[str, ...] = (f"{host}:{port}",)
        if sys.platform == "linux":
            name = f"warmroot-{secrets.token_hex(16)}"
            local = socket.socket(socket.AF_UNIX)
            local.bind(f"\0{name}")
            local.listen()
            self._sockets.append(local)
            self.addresses = (f"@{name}", *self.addresses)
        self._selector = selectors.DefaultSelector()
        for listening in self._sockets:
            self._selector.register(listening, selectors.EVENT_READ)

    def accept(self, deadline: float) -> tuple[Hello, socket.socket] | None:
        """The next rank that shows the token; None when ``time.monotonic()`` reaches ``deadline``."""
        while (remaining := deadline - time.monotonic()) > 0:
            for key, _ in self._selector.select(remaining):
                connection, _ = cast(socket.socket, key.fileobj).accept()
                hello = self._greet(connection)
                if hello is not None:
                    return hello, connection
                connection.close()
        return None

    def _greet(self, connection: socket.socket) -> Hello | None:
        try:
            _configure(connection)
            connection.settimeout(_HELLO_S)
            version, token, rank, purpose = msgpack.unpackb(_read_frame(connection, time.monotonic() + _HELLO_S))
            if version != _VERSION or not hmac.compare_digest(str(token).encode(), self._token.encode()):
                raise WireError("wrong version or token")
            connection.sendall(frame(_WELCOME))
            return Hello(int(rank), purpose)
        except Exception as error:  # a stranger's bytes can break anything
            logger.warning("refused a connection: %s: %s", type(error).__name__, error)
            return None

    def close(self) -> None:
        """Accept nobody any more."""
        self._selector.close()
        for listening in self._sockets:
            listening.close()


def connect(addresses: Sequence[str], token: str, hello: Hello, deadline: float) -> socket.socket:
    """Connect to the first of the leader's addresses that answers, before ``time.monotonic()`` reaches ``deadline``.

    Raises RankLostError if none does, or if the leader refuses.
    """
    while True:
        outcome: socket.socket | Exception | None = None
        for address in addresses:
            outcome = _attempt(address, token, hello, deadline)
            if isinstance(outcome, socket.socket):
                return outcome
        if time.monotonic() + _RETRY_S > deadline:
            raise RankLostError(f"the leader at {' or '.join(addresses)} does not let rank {hello.rank} in: {outcome}")
        time.sleep(_RETRY_S)


def _attempt(address: str, token: str, hello: Hello, deadline: float) -> socket.socket | Exception:
    try:
        return _connect(address, token, hello, deadline)
    except (OSError, WireError) as error:
        return error


def _connect(address: str, token: str, hello: Hello, deadline: float) -> socket.socket:
    local = address.startswith("@")
    connection = socket.socket(socket.AF_UNIX) if local else socket.socket(_family(address))
    try:
        connection.settimeout(max(1e-3, deadline - time.monotonic()))
        connection.connect(f"\0{address[1:]}" if local else _split(address))
        _configure(connection)
        connection.sendall(frame(cast(bytes, msgpack.packb([_VERSION, token, hello.rank, hello.purpose]))))
        if _read_frame(connection, deadline) != _WELCOME:
            raise WireError("no welcome")
        return connection
    except BaseException:
        connection.close()
        raise


def _configure(connection: socket.socket) -> None:
    if connection.family != socket.AF_UNIX:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def _split(address: str) -> tuple[str, int]:
    host, port = address.rsplit(":", 1)
    return host, int(port)


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if address.count(":") > 1 else socket.AF_INET


def _read_frame(connection: socket.socket, deadline: float) -> bytes:
    """One frame and not a byte more: what follows belongs to the link. Byte by byte it takes no longer than at once."""
    size = int.from_bytes(_read(connection, 4, deadline), "big")
    if size > MAX_HELLO_BYTES:
        raise WireError(f"a greeting of {size} bytes")
    return _read(connection, size, deadline)


def _read(connection: socket.socket, size: int, deadline: float) -> bytes:
    data = b""
    while len(data) < size:
        connection.settimeout(max(1e-3, deadline - time.monotonic()))
        more = connection.recv(size - len(data))
        if not more:
            raise WireError("closed while it greeted")
        data += more
    return data
