"""The streamed response: events go out as fast as deltas come and the client reads."""

from collections.abc import AsyncGenerator, Mapping
from typing import Any, Protocol

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from .chunks import KEEP_ALIVE
from .errors import body_of
from .feed import Arrival, DeltaFeed


class EventWriter(Protocol):
    """Writes the events of one response, each as a text that ends with an empty line."""

    def begin(self) -> str:
        """Before the first delta."""
        ...

    def write(self, arrival: Arrival) -> str:
        """Of one delta; none when it has nothing to show yet."""
        ...

    def end(self) -> str:
        """After the last delta."""
        ...

    def fail(self, error: dict[str, Any]) -> str:
        """The one that ends a stream which cannot go on; ``error`` is the error's body."""
        ...


class EventStream(Response):
    """Sends what a started feed brings and closes it. The feed watches the connection: a client that leaves ends it.

    ``first`` are the arrivals that the route has awaited, so that a refusal could still have its own status.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        feed: DeltaFeed,
        writer: EventWriter,
        first: list[Arrival],
        headers: Mapping[str, str],
        request_id: str,
    ) -> None:
        self._feed = feed
        self._writer = writer
        self._first = first
        self._request_id = request_id
        self.status_code = 200
        self.background = None
        self.init_headers({"cache-control": "no-cache", "x-accel-buffering": "no", **headers})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """An ASGI application."""
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            async for events in self._events():
                await send({"type": "http.response.body", "body": events.encode(), "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            await self._feed.aclose()

    async def _events(self) -> AsyncGenerator[str, None]:
        write = self._writer.write
        events, arrived = self._writer.begin(), self._first
        try:
            while not self._feed.disconnected:
                events += "".join([write(arrival) for arrival in arrived])
                if self._feed.done:
                    yield events + self._writer.end()
                    return
                if events or not arrived:
                    yield events or KEEP_ALIVE
                events, arrived = "", await self._feed.next()
        except Exception as error:
            yield self._writer.fail(body_of(error, self._request_id))
