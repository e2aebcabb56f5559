"""The replica's end of the channel: takes requests from every ingress, sends each one its deltas once per step."""

import asyncio
import hmac
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Protocol, cast

from ..cluster.engine_counts import EngineCounts
from ..cluster.errors import (
    AuthenticationError,
    EngineError,
    InvalidRequestError,
    ReplicaUnavailableError,
    WarmrootError,
)
from ..cluster.ids import RequestId
from ..cluster.messages import FinishReason, GenerateRequest, Load, ReplicaInfo, TokenDelta
from . import silence, wire
from .channel_messages import PROTOCOL_VERSION
from .channel_tls import ChannelTls
from .silence import PING_S
from .wire import WireError

HELLO_TIMEOUT_S = 5.0
FLUSH_S = 1.0
"""What was sent last may take so long to leave when the channel is closed."""
MAX_UNSENT_BYTES = 64 * 2**20
"""An ingress that reads this far too slowly is cut off."""

logger = logging.getLogger(__name__)


class ReplicaService(Protocol):
    """What the server needs of an engine. All calls come from the server's event loop and must not block."""

    @property
    def info(self) -> ReplicaInfo:
        """What the replica announces."""
        ...

    def load(self) -> Load:
        """How busy it is now."""
        ...

    def submit(self, request: GenerateRequest) -> None:
        """Queue it. Raises a WarmrootError to refuse it; deltas come by ``ChannelServer.push``, never inside."""
        ...

    def abort(self, request_id: RequestId) -> None:
        """Forget it; unknown ids are fine."""
        ...


Answerer = Callable[[str, Mapping[str, Any]], Awaitable[dict[str, Any]]]
"""Does something besides generating. Raises a WarmrootError where it cannot."""


class ChannelServer:
    """Serves one ``ReplicaService`` on TCP. ``token`` is the cluster's shared secret; ``counts`` go with every pong.

    An ingress that asks nothing any more, not even for a pong, is gone: its requests are aborted.
    """

    def __init__(self, service: ReplicaService, token: str, counts: Callable[[], EngineCounts] = EngineCounts) -> None:
        self.service = service
        self.counts = counts
        self.answerer: Answerer | None = None
        """For what is asked besides generating."""
        self._answering: set[asyncio.Task[None]] = set()
        self.owners: dict[RequestId, _Connection] = {}
        self.suspects: set[RequestId] = set()
        """Those of ``owners`` that may be what ends replicas."""
        self.draining = False
        self._token = token
        self._connections: set[_Connection] = set()
        self._server: asyncio.Server | None = None

    async def start(self, host: str, port: int = 0, tls: ChannelTls | None = None) -> str:
        """Listen; returns ``host:port``, with the port that was free if 0 was asked for."""
        loop = asyncio.get_running_loop()
        self._tls = tls
        options = {} if tls is None else {"ssl": tls.server(), "ssl_handshake_timeout": HELLO_TIMEOUT_S}
        self._server = await loop.create_server(lambda: _Connection(self), host, port, **options)
        self._watch = loop.create_task(self._watch_for_silence())
        bound = cast("tuple[str, int]", self._server.sockets[0].getsockname()[:2])
        return f"{bound[0]}:{bound[1]}"

    async def close(self) -> None:
        """Stop listening and end every connection, which aborts its requests. What was pushed still goes out."""
        if self._server is not None:
            self._server.close()
            self._watch.cancel()
        for connection in list(self._connections):
            connection.close()
        await asyncio.sleep(0)
        loop = asyncio.get_running_loop()
        deadline = loop.time() + FLUSH_S
        while self._connections and loop.time() < deadline:
            await asyncio.sleep(0.01)
        for connection in list(self._connections):
            connection.cut()
        await asyncio.sleep(0)

    def drain(self) -> None:
        """Take no more requests, and tell all who could send some."""
        self.draining = True
        for connection in self._connections:
            connection.tell_that_it_drains()

    def hand_back(self, request_ids: Sequence[RequestId]) -> None:
        """End requests here, with a word that they are to go on elsewhere. Deltas pushed later are dropped."""
        for request_id in request_ids:
            self.service.abort(request_id)
        self.push(
            [
                TokenDelta(request_id=request_id, index=0, token_ids=[], finish_reason=FinishReason.HANDED_BACK)
                for request_id in request_ids
            ]
        )

    def push(self, deltas: list[TokenDelta]) -> None:
        """Send the deltas of one engine step: one message per connection. Call it on the server's event loop."""
        shares: dict[_Connection, list[TokenDelta]] = {}
        for delta in deltas:
            owner = self.owners.get(delta.request_id)
            if owner is None:
                continue
            shares.setdefault(owner, []).append(delta)
            if delta.finish_reason is not None:
                owner.disown(delta.request_id)
        load = self.service.load()
        for connection, share in shares.items():
            connection.send_deltas(share, load)

    def answer(self, connection: "_Connection", ask: wire.Ask) -> None:
        """Answer in the background."""
        task = asyncio.get_running_loop().create_task(self._answer(connection, ask))
        self._answering.add(task)
        task.add_done_callback(self._answering.discard)

    async def _answer(self, connection: "_Connection", ask: wire.Ask) -> None:
        try:
            if self.answerer is None:
                raise ReplicaUnavailableError(f"{self.service.info.replica} is not ready for {ask.what}")
            connection.send(wire.Answer(ask.number, await self.answerer(ask.what, ask.arguments)))
        except WarmrootError as error:
            connection.send(wire.Answer(ask.number, {}, error))
        except Exception as error:
            logger.exception("%s failed", ask.what)
            connection.send(wire.Answer(ask.number, {}, EngineError(f"{type(error).__name__}: {error}")))

    def admits(self, token: str) -> bool:
        """Whether the peer knows the secret, in time that does not tell how much of it was right."""
        return hmac.compare_digest(token.encode(), self._token.encode())

    def joined(self, connection: "_Connection") -> None:
        """A peer connected."""
        self._connections.add(connection)

    def left(self, connection: "_Connection") -> None:
        """A peer is gone: nobody waits for its requests any more."""
        self._connections.discard(connection)
        for request_id in list(connection.requests):
            connection.disown(request_id)
            self.service.abort(request_id)

    async def _watch_for_silence(self) -> None:
        while True:
            await asyncio.sleep(PING_S)
            if self._tls is not None:
                self._tls.renew()
            for connection in list(self._connections):
                connection.check_silence()


class _Connection(asyncio.Protocol):
    """One ingress."""

    def __init__(self, server: ChannelServer) -> None:
        self.requests: set[RequestId] = set()
        self._server = server
        self._frames = wire.FrameDecoder(wire.MAX_HELLO_BYTES)
        self._trusted = False
        self._silent_s = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._server.joined(self)
        self._deadline = asyncio.get_running_loop().call_later(HELLO_TIMEOUT_S, self.cut)

    def connection_lost(self, exc: Exception | None) -> None:
        self._deadline.cancel()
        self._server.left(self)

    def data_received(self, data: bytes) -> None:
        self._silent_s = 0.0
        self._frames.feed(data)
        try:
            while not self._transport.is_closing() and (body := self._frames.next()) is not None:
                self._handle(wire.decode(body))
        except WarmrootError as error:
            logger.warning("closing the channel to %s: %s", self._transport.get_extra_info("peername"), error)
            self.send(wire.Failure(error))
            self._transport.close()

    def send_deltas(self, deltas: list[TokenDelta], load: Load) -> None:
        try:
            self.send(wire.Deltas(deltas, load))
        except WireError:
            # Its streams can no longer be whole; the others' must not suffer for it.
            logger.exception("cutting off %s", self._transport.get_extra_info("peername"))
            self.cut()
        if self._transport.get_write_buffer_size() > MAX_UNSENT_BYTES:
            logger.warning("cutting off an ingress that does not read: %s", self._transport.get_extra_info("peername"))
            self.cut()

    def disown(self, request_id: RequestId) -> None:
        self.requests.discard(request_id)
        self._server.owners.pop(request_id, None)
        self._server.suspects.discard(request_id)

    def tell_that_it_drains(self) -> None:
        if self._trusted:
            self.send(wire.Draining())

    def check_silence(self) -> None:
        self._silent_s += PING_S
        if self._silent_s > silence.MOST_S:
            logger.warning("cutting off an ingress that fell silent: %s", self._transport.get_extra_info("peername"))
            self.cut()

    def close(self) -> None:
        self._transport.close()

    def cut(self) -> None:
        self._transport.abort()

    def _handle(self, message: wire.Message | wire.FromLater) -> None:
        match message:
            case wire.Hello(token, version) if not self._trusted:
                self._greet(token, version)
            case _ if not self._trusted:
                raise AuthenticationError("say hello first")
            case wire.Submit(request):
                self._submit(request)
            case wire.Abort(request_id):
                if request_id in self.requests:
                    self.disown(request_id)
                    self._server.service.abort(request_id)
            case wire.Ping():
                self.send(wire.Pong(self._server.service.load(), self._server.counts()))
            case wire.Ask():
                self._server.answer(self, message)
            case wire.Unreadable(request_id, parameters):
                error = ReplicaUnavailableError(f"this replica does not know {', '.join(parameters)}")
                self.send(wire.Rejected(request_id, error, self._server.service.load()))
            case wire.Unknown():
                logger.debug("passing over a message of a later release")
            case _:
                raise WireError(f"a replica takes no {type(message).__name__}")

    def _greet(self, token: str, version: int) -> None:
        if not self._server.admits(token):
            raise AuthenticationError("wrong cluster token")
        if version < PROTOCOL_VERSION:  # a later one knows how to speak to this one
            raise WireError(f"protocol version {version}, this replica speaks {PROTOCOL_VERSION}")
        self._trusted = True
        self._deadline.cancel()
        self._frames.limit = wire.MAX_FRAME_BYTES
        self.send(wire.HelloAck(self._server.service.info, self._server.service.load()))
        if self._server.draining:
            self.tell_that_it_drains()

    def _submit(self, request: GenerateRequest) -> None:
        service = self._server.service
        try:
            if self._server.draining:
                raise ReplicaUnavailableError(f"{service.info.replica} is about to stop")
            if request.request_id in self._server.owners:
                raise InvalidRequestError(f"request {request.request_id} is already running", param="request_id")
            if request.is_suspect and self._server.suspects:  # another router's
                raise ReplicaUnavailableError(f"{service.info.replica} has a request that may end it already")
            service.submit(request)
        except WarmrootError as error:
            self.send(wire.Rejected(request.request_id, error, service.load()))
        except Exception as error:
            logger.exception("submitting %s failed", request.request_id)
            fault = EngineError(f"{type(error).__name__}: {error}")
            self.send(wire.Rejected(request.request_id, fault, service.load()))
        else:
            self.requests.add(request.request_id)
            self._server.owners[request.request_id] = self
            if request.is_suspect:
                self._server.suspects.add(request.request_id)
            self.send(wire.Accepted(request.request_id, service.load()))

    def send(self, message: wire.Message) -> None:
        if not self._transport.is_closing():
            self._transport.write(wire.encode(message))
