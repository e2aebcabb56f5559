"""A load client for ``/v1/completions``: one keep-alive connection per request in flight, no HTTP library."""

import asyncio
import json
import math
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

from ...cluster.errors import ServerError
from .peers.protocol import Job, Timing
from .sse import SseReader


class RequestFailedError(ServerError):
    """The server refused or broke a request of the load."""

    code = "bench_request_failed"


class RequestRefusedError(RequestFailedError):
    """429: there is room after ``retry_after_s``."""

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


@dataclass(frozen=True, slots=True)
class Served:
    """A request as its client saw it."""

    timing: Timing
    replica: str


class _Connection(asyncio.Protocol):
    """Carries one request at a time and notes when each event comes."""

    def __init__(self) -> None:
        self._reader = SseReader()
        self._moments: list[float] = []
        self._answer: asyncio.Future[tuple[SseReader, list[float]]] | None = None
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        now = time.perf_counter()
        self._moments += [now] * len(self._reader.feed(data))
        if self._reader.complete and self._answer is not None and not self._answer.done():
            self._answer.set_result((self._reader, self._moments))

    def connection_lost(self, exc: Exception | None) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(RequestFailedError(f"the connection broke: {exc}"))

    async def ask(self, request: bytes) -> tuple[SseReader, list[float]]:
        """Send, and wait for the whole response."""
        assert self._transport is not None
        self._reader, self._moments = SseReader(), []
        self._answer = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        return await self._answer

    @property
    def is_open(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()


class LoadClient:
    """Sends jobs to one endpoint and measures them. Connections are reused; close it at the end."""

    def __init__(self, url: str, model: str, api_key: str = "") -> None:
        parts = urlsplit(url)
        self._host, self._port = parts.hostname or "127.0.0.1", parts.port or 80
        self._path, self._model = f"{parts.path.rstrip('/')}/v1/completions", model
        self._authorization = f"Authorization: Bearer {api_key}\r\n" if api_key else ""
        self._idle: deque[_Connection] = deque()

    async def closed_loop(self, jobs: Sequence[Job], concurrency: int) -> list[Served]:
        """Keep ``concurrency`` requests in flight until all are done. Who is refused comes back when told."""
        began = time.perf_counter()
        served: dict[int, Served] = {}
        waiting = iter(enumerate(jobs))

        async def stream() -> None:
            for index, job in waiting:
                served[index] = await self._patiently(job, began)

        await asyncio.gather(*(stream() for _ in range(concurrency)))
        return [served[index] for index in range(len(jobs))]

    async def open_loop(self, jobs: Sequence[Job], arrivals: Sequence[float]) -> list[Served]:
        """Send each job at its time, whatever has become of the others."""
        began = time.perf_counter()

        async def later(job: Job, moment: float) -> Served:
            await asyncio.sleep(began + moment - time.perf_counter())
            return await self.one(job, began)

        return await asyncio.gather(*map(later, jobs, arrivals))

    async def close(self) -> None:
        """Close the connections."""
        while self._idle:
            self._idle.pop().close()

    async def one(self, job: Job, began: float) -> Served:
        """Send a job now; times are seconds since ``began``. Raises RequestRefusedError, RequestFailedError."""
        request = self._request(job)
        while self._idle and not self._idle[-1].is_open:  # the proxy closes what was idle for long
            self._idle.pop()
        connection = self._idle.pop() if self._idle else await self._connect()
        start = time.perf_counter()
        response, moments = await connection.ask(request)
        if response.status == 429:
            self._idle.append(connection)
            told_s = float(response.headers.get("retry-after-ms", "nan")) / 1e3
            raise RequestRefusedError(response.body[:500].decode(errors="replace"), told_s)
        if response.status != 200 or not moments:
            raise RequestFailedError(f"status {response.status}: {response.body[:500].decode(errors='replace')}")
        self._idle.append(connection)
        # A piece of text may span several tokens, and the end may come by itself: the number of tokens is known.
        moments = (moments + [moments[-1]] * job.max_tokens)[: job.max_tokens]
        timing = Timing(
            start - began,
            [moment - began for moment in moments],
            int(response.headers.get("x-warmroot-cached-tokens", 0)),
        )
        return Served(timing, response.headers.get("x-warmroot-replica", ""))

    async def _patiently(self, job: Job, began: float) -> Served:
        try:
            return await self.one(job, began)
        except RequestRefusedError as refused:
            if math.isnan(refused.retry_after_s):
                raise
            await asyncio.sleep(refused.retry_after_s)
        return await self._patiently(job, began)

    async def _connect(self) -> _Connection:
        _, connection = await asyncio.get_running_loop().create_connection(_Connection, self._host, self._port)
        return connection

    def _request(self, job: Job) -> bytes:
        body = json.dumps(
            {
                "model": self._model,
                "prompt": job.prompt,
                "max_tokens": job.max_tokens,
                "temperature": 0,
                "ignore_eos": True,
                "stream": True,
            },
            separators=(",", ":"),
        ).encode()
        head = (
            f"POST {self._path} HTTP/1.1\r\nHost: {self._host}:{self._port}\r\n"
            f"{self._authorization}Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        return head.encode() + body
