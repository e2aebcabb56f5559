"""The deltas of one HTTP request: the streams of its prompts, merged, and cut when the client leaves."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import NamedTuple

from starlette.types import Receive

from ..metrics import RequestMeter
from ..output import OutputDelta


class Arrival(NamedTuple):
    """A delta and the number of the prompt it belongs to."""

    prompt: int
    delta: OutputDelta


class DeltaFeed:
    """Pulls every stream in a task of its own, so that deltas which came while the last ones were written go together.

    ``receive`` is the connection's: its ``http.disconnect`` closes the streams at once. One to two
    ``keep_alive_s`` of silence make ``next`` return an empty list. Whoever calls ``start`` must call ``aclose``.
    """

    def __init__(
        self,
        streams: Sequence[AsyncGenerator[OutputDelta, None]],
        meters: Sequence[RequestMeter],
        receive: Receive,
        keep_alive_s: float,
    ) -> None:
        self._streams = streams
        self._meters = meters
        self._receive = receive
        self._keep_alive_s = keep_alive_s
        self._ready: list[Arrival] = []
        self._open = len(streams)
        self._error: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._active = False
        self._silent = False
        self.disconnected = False
        """The client has left."""

    @property
    def done(self) -> bool:
        """Every stream has ended well, or the client has left, and everything was handed out."""
        return not self._open and not self._ready and self._error is None

    def start(self) -> None:
        """Begin to pull."""
        self._loop = asyncio.get_running_loop()
        self._pumps = [self._loop.create_task(self._pump(*numbered)) for numbered in enumerate(self._streams)]
        self._watcher = self._loop.create_task(self._watch())
        self._timer = self._loop.call_later(self._keep_alive_s, self._tick)

    async def next(self) -> list[Arrival]:
        """What has arrived: at least one delta, or nothing at the end and after a silence.

        Raises the error of the stream that failed first, after everything that came before it.
        """
        while not self._ready:
            if self._error is not None:
                raise self._error
            if self._silent or not self._open:
                break
            self._waiter = self._loop.create_future()
            await self._waiter
        arrived, self._ready = self._ready, []
        self._active, self._silent = True, False
        return arrived

    async def aclose(self) -> None:
        """Close every stream, and wait until they are."""
        self._timer.cancel()
        self._watcher.cancel()
        self._cancel()
        unfinished = [pump for pump in self._pumps if not pump.done()]
        await asyncio.gather(self._watcher, *unfinished, return_exceptions=True)

    async def _pump(self, prompt: int, stream: AsyncGenerator[OutputDelta, None]) -> None:
        meter = self._meters[prompt]
        observe = meter.observe
        try:
            async with aclosing(stream):
                async for delta in stream:
                    observe(delta)
                    self._ready.append(Arrival(prompt, delta))
                    self._wake()
        except asyncio.CancelledError:
            meter.abandon("abort")
            raise
        except Exception as error:
            meter.abandon("error")
            self._error = self._error or error
            self._cancel()
        finally:
            self._open -= 1
            self._wake()

    async def _watch(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self.disconnected = True
        self._cancel()

    def _cancel(self) -> None:
        current = asyncio.current_task()
        for pump in self._pumps:
            if pump is not current:
                pump.cancel()

    def _tick(self) -> None:
        self._timer = self._loop.call_later(self._keep_alive_s, self._tick)
        if not self._active:
            self._silent = True
            self._wake()
        self._active = False

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
