"""The ingress's end of the channel: one lasting connection to one replica, and a stream per request over it."""

import asyncio
import logging
import socket
from collections import deque
from collections.abc import Callable
from typing import Any, cast

from ..cluster.engine_counts import EngineCounts
from ..cluster.errors import (
    DeadlineExceededError,
    EngineError,
    ReplicaLostError,
    ReplicaUnavailableError,
    WarmrootError,
)
from ..cluster.ids import RequestId
from ..cluster.messages import FinishReason, GenerateRequest, Load, ReplicaInfo, TokenDelta
from ..cluster.time_limits import TimeLimits
from ..cluster.within import within
from . import wire
from .channel_tls import ChannelTls
from .silence import PING_S, Silence
from .wire import WireError

FIRST_BACKOFF_S = 0.05
MAX_BACKOFF_S = 2.0

logger = logging.getLogger(__name__)


class DeltaStream:
    """Deltas of one request, in order: an async iterator. ``close`` before the last one aborts the request."""

    def __init__(self, request_id: RequestId, abort: Callable[[RequestId], None], age_s: float = 0.0) -> None:
        """``age_s``: how long its first token has been waited for already."""
        self.request_id = request_id
        self._clock = asyncio.get_running_loop().time
        self._has_begun = False
        self._heard = self._clock() - age_s
        self._abort = abort
        self._deltas: deque[TokenDelta] = deque()
        self._error: WarmrootError | None = None
        self._ended = False
        self._waiter: asyncio.Future[None] | None = None

    def __aiter__(self) -> "DeltaStream":
        return self

    async def __anext__(self) -> TokenDelta:
        """The next delta. Raises ReplicaLostError when the replica was lost or stops before the last one, EngineError
        when the request itself failed, DeadlineExceededError when it took longer than it may.
        """
        while not self._deltas:
            if self._error is not None:
                raise self._error
            if self._ended:
                raise StopAsyncIteration
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        return self._deltas.popleft()

    def put(self, delta: TokenDelta) -> None:
        """A delta came."""
        if not self._ended:
            self._has_begun, self._heard = True, self._clock()
            self._deltas.append(delta)
            self._ended = delta.finish_reason is not None
            self._wake()

    def fail(self, error: WarmrootError) -> None:
        """No further delta will come."""
        if not self._ended:
            self._ended, self._error = True, error
            self._wake()

    def check(self, limits: TimeLimits) -> None:
        """End it if nothing has come for too long."""
        limit_s = limits.idle_stream_timeout if self._has_begun else limits.first_token_timeout
        if limit_s and self._clock() - self._heard > limit_s and not self._ended:
            what = "next" if self._has_begun else "first"
            self._abort(self.request_id)
            self.fail(DeadlineExceededError(f"no {what} token within {limit_s:g} s"))

    def close(self) -> None:
        """The consumer is through with it."""
        if not self._ended:
            self._ended = True
            self._abort(self.request_id)

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class ChannelClient:
    """Keeps one connection to the replica that ``info`` describes, and comes back with a backoff when it breaks.

    ``load`` is the replica's latest word on itself. ``on_change`` is called when ``connected`` or ``draining`` changes.
    """

    def __init__(
        self,
        info: ReplicaInfo,
        token: str,
        on_change: Callable[[], None] = lambda: None,
        *,
        limits: TimeLimits | None = None,
        tls: ChannelTls | None = None,
    ) -> None:
        self.info = info
        self.on_change = on_change
        self.load = Load(kv_total_blocks=info.kv_total_blocks, max_num_seqs=info.max_num_seqs)
        self.counts = EngineCounts()
        self._token = token
        self._tls = tls
        self.limits = limits or TimeLimits.model_validate({})
        self._connection: _Connection | None = None
        self._task: asyncio.Task[None] | None = None

    @property
    def connected(self) -> bool:
        """Whether a request can be submitted now."""
        return self._connection is not None and self._connection.alive

    @property
    def draining(self) -> bool:
        """Whether the replica takes no more requests, and finishes what it has."""
        return self._connection is not None and self._connection.draining

    def start(self) -> None:
        """Connect in the background."""
        self._task = asyncio.get_running_loop().create_task(self._run(), name=f"channel {self.info.replica}")

    async def close(self) -> None:
        """Disconnect; open streams fail with ReplicaLostError."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    async def submit(self, request: GenerateRequest) -> DeltaStream:
        """Its deltas, once the replica accepted it. Raises what the replica refused it with, ReplicaLostError when the
        connection breaks before the answer, ReplicaUnavailableError without a connection.
        """
        if self._connection is None or not self._connection.alive:
            raise ReplicaUnavailableError(f"not connected to {self.info.replica}")
        return await self._connection.submit(request)

    async def ask(self, what: str, arguments: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        """Have the replica do something besides generating. Raises what it raised, ReplicaLostError when the connection
        breaks before the answer, ReplicaUnavailableError without a connection, DeadlineExceededError.
        """
        if self._connection is None or not self._connection.alive:
            raise ReplicaUnavailableError(f"not connected to {self.info.replica}")
        try:
            return await within(timeout_s, self._connection.ask(what, arguments))
        except asyncio.TimeoutError:
            raise DeadlineExceededError(f"{self.info.replica} did not {what} within {timeout_s:g} s") from None

    async def _run(self) -> None:
        backoff = FIRST_BACKOFF_S
        while True:
            try:
                await self._serve_one_connection()
                backoff = FIRST_BACKOFF_S
            except (OSError, asyncio.TimeoutError, WarmrootError) as error:
                logger.info("channel to %s at %s: %s", self.info.replica, self.info.address, error)
            await asyncio.sleep(backoff)
            backoff = min(MAX_BACKOFF_S, 2 * backoff)

    async def _serve_one_connection(self) -> None:
        host, _, port = self.info.address.rpartition(":")
        loop = asyncio.get_running_loop()
        tls = None if self._tls is None else self._tls.client()
        open_connection = loop.create_connection(lambda: _Connection(self), host.strip("[]"), int(port), ssl=tls)
        _, connection = await within(self.limits.connect_timeout, open_connection)
        try:
            ack = await within(self.limits.connect_timeout, connection.greet(self._token))
            if (ack.info.replica, ack.info.epoch) != (self.info.replica, self.info.epoch):
                raise WireError(f"{self.info.address} is now {ack.info.replica} of epoch {ack.info.epoch}")
            self.load, self._connection = ack.load, connection
            self.on_change()
            await connection.live()
        finally:
            self._connection = None
            connection.cut()


class _Connection(asyncio.Protocol):
    """One life of the connection."""

    def __init__(self, client: ChannelClient) -> None:
        loop = asyncio.get_running_loop()
        self._client = client
        self._frames = wire.FrameDecoder(wire.MAX_FRAME_BYTES)
        self._streams: dict[RequestId, DeltaStream] = {}
        self._answers: dict[RequestId, asyncio.Future[None]] = {}
        self._asked: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._num_asked = 0
        self._ack: asyncio.Future[wire.HelloAck] = loop.create_future()
        self._lost: asyncio.Future[None] = loop.create_future()
        self._silence = Silence(loop.time)
        self._reason: WarmrootError | None = None
        self.draining = False

    @property
    def alive(self) -> bool:
        """Whether what is sent now still has an answer, or a loss, to come."""
        return not self._lost.done() and not self._transport.is_closing()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def connection_lost(self, exc: Exception | None) -> None:
        replica = self._client.info.replica
        why = self._reason or ReplicaLostError(f"lost the connection to {replica}: {exc or 'closed'}")
        greeted = self._ack.done()
        if not greeted:
            self._ack.set_exception(why)
            self._ack.exception()  # read, so that a caller that timed out leaves no warning behind
        self._lost.set_result(None)
        if greeted:  # before anyone hears of it who would choose a replica again
            self._client.on_change()
        reason = why.reason if isinstance(why, ReplicaLostError) else "connection"
        for answer in (*self._answers.values(), *self._asked.values()):
            if not answer.done():
                answer.set_exception(ReplicaLostError(str(why), reason=reason))
        for stream in self._streams.values():
            stream.fail(ReplicaLostError(str(why), reason=reason))
        self._answers.clear()
        self._streams.clear()

    def data_received(self, data: bytes) -> None:
        self._silence.heard()
        self._frames.feed(data)
        try:
            while not self._transport.is_closing() and (body := self._frames.next()) is not None:
                self._handle(wire.decode(body))
        except WarmrootError as error:
            logger.warning("closing the channel to %s: %s", self._client.info.replica, error)
            self._reason = self._reason or error
            self.cut()

    async def greet(self, token: str) -> wire.HelloAck:
        self._send(wire.Hello(token))
        self._silence.asked()
        return await asyncio.shield(self._ack)

    async def live(self) -> None:
        """Until the connection is lost; notices a silent peer."""
        while not self._lost.done():
            await asyncio.wait([self._lost], timeout=PING_S)
            if self._silence.too_long(PING_S):
                self._reason = ReplicaLostError(f"{self._client.info.replica} fell silent", reason="silence")
                self.cut()
            self._send(wire.Ping())
            self._silence.asked()
            for stream in list(self._streams.values()):
                stream.check(self._client.limits)

    async def submit(self, request: GenerateRequest) -> DeltaStream:
        request_id = request.request_id
        frame = wire.encode(wire.Submit(request))
        self._streams[request_id] = stream = DeltaStream(
            request_id, self._abort, 0.0 if request.output_token_ids else request.age
        )
        self._answers[request_id] = answer = asyncio.get_running_loop().create_future()
        self._transport.write(frame)
        try:
            await answer
        except asyncio.CancelledError:
            stream.close()
            raise
        except WarmrootError:
            self._streams.pop(request_id, None)
            raise
        finally:
            self._answers.pop(request_id, None)
        return stream

    async def ask(self, what: str, arguments: dict[str, Any]) -> dict[str, Any]:
        self._num_asked += 1
        number = self._num_asked
        self._asked[number] = asyncio.get_running_loop().create_future()
        try:
            self._send(wire.Ask(number, what, arguments))
            return await self._asked[number]
        finally:
            del self._asked[number]

    def cut(self) -> None:
        self._transport.abort()

    def _handle(self, message: wire.Message | wire.FromLater) -> None:
        match message:
            case wire.Deltas(deltas, load):
                self._client.load = load
                for delta in deltas:
                    self._deliver(delta)
            case wire.Accepted() | wire.Rejected():
                self._client.load = message.load
                self._answered(message)
            case wire.Pong(load, counts):
                self._client.load, self._client.counts = load, counts
            case wire.HelloAck() if not self._ack.done():
                self._ack.set_result(message)
            case wire.Draining():
                self._drain()
            case wire.Answer():
                self._settle(message)
            case wire.Unknown():
                logger.debug("passing over a message of a later release")
            case wire.Failure(error):
                self._reason = error
                self.cut()
            case _:
                raise WireError(f"an ingress takes no {type(message).__name__}")

    def _answered(self, message: wire.Accepted | wire.Rejected) -> None:
        answer = self._answers.get(message.request_id)
        if answer is None or answer.done():
            return
        if isinstance(message, wire.Rejected):
            answer.set_exception(message.error)
        else:
            answer.set_result(None)

    def _settle(self, answer: wire.Answer) -> None:
        asked = self._asked.get(answer.number)
        if asked is None or asked.done():
            return
        if answer.error is None:
            asked.set_result(answer.result)
        else:
            asked.set_exception(answer.error)

    def _deliver(self, delta: TokenDelta) -> None:
        stream = self._streams.get(delta.request_id)
        if stream is None:
            return
        if delta.finish_reason is not None:
            del self._streams[delta.request_id]
        replica = self._client.info.replica
        match delta.finish_reason:
            case FinishReason.ERROR:
                stream.fail(EngineError(f"{replica} failed on the request: {delta.error}"))
            case FinishReason.LOST:
                self._drain()  # its engine has lost all that it had
                stream.fail(ReplicaLostError(f"{replica} failed: {delta.error}", reason="engine"))
            case FinishReason.HANDED_BACK:
                stream.fail(ReplicaLostError(f"{replica} is about to stop", reason="draining"))
            case _:
                stream.put(delta)

    def _drain(self) -> None:
        if not self.draining:
            self.draining = True
            self._client.on_change()

    def _abort(self, request_id: RequestId) -> None:
        self._streams.pop(request_id, None)
        self._send(wire.Abort(request_id))

    def _send(self, message: wire.Message) -> None:
        if not self._transport.is_closing():
            self._transport.write(wire.encode(message))
