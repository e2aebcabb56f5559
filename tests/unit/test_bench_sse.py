"""The load client's reader of server-sent events, and the client against a small server."""

import asyncio
import json

import pytest

from warmroot.deploy.bench.client import LoadClient, RequestFailedError, RequestRefusedError
from warmroot.deploy.bench.peers.protocol import Job
from warmroot.deploy.bench.sse import SseReader

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nTransfer-Encoding: chunked\r\n"


def chunk(text: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(text), text)


STREAM = (
    HEAD
    + b"X-Warmroot-Replica: r1\r\nx-warmroot-cached-tokens: 48\r\n\r\n"
    + chunk(b"data: one\n\n")
    + chunk(b"data: two\n\ndata: th")
    + chunk(b"ree\n\n: keep-alive\n\n")
    + chunk(b"data: [DONE]\n\n")
    + chunk(b"")
)


@pytest.mark.parametrize("size", [1, 2, 7, 64, 10_000])
def test_events_however_the_bytes_are_cut(size: int) -> None:
    reader = SseReader()
    events = [event for at in range(0, len(STREAM), size) for event in reader.feed(STREAM[at : at + size])]
    assert events == [b"one", b"two", b"three"]
    assert reader.complete and reader.status == 200
    assert reader.headers["x-warmroot-replica"] == "r1"


def test_a_stream_is_not_complete_before_its_last_chunk() -> None:
    reader = SseReader()
    reader.feed(STREAM[:-5])
    assert not reader.complete
    reader.feed(STREAM[-5:])
    assert reader.complete


def test_an_error_with_a_length() -> None:
    reader = SseReader()
    body = b'{"error":{}}'
    head = b"HTTP/1.1 429 Too Many Requests\r\nContent-Type: application/json\r\nContent-Length: 12\r\n\r\n"
    assert reader.feed(head + body[:5]) == [] and not reader.complete
    assert reader.feed(body[5:]) == []
    assert reader.complete and reader.status == 429 and reader.body == body


class TinyServer:
    """Answers each request with a token per event; counts connections."""

    def __init__(self, status: int = 200) -> None:
        self.status = status
        self.connections = 0
        self.prompts: list[list[int]] = []

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                length = int(head.lower().split("content-length: ")[1].split("\r\n")[0])
                request = json.loads(await reader.readexactly(length))
                self.prompts.append(request["prompt"])
                writer.write(self.answer(request["max_tokens"]))
                await writer.drain()
        except asyncio.IncompleteReadError:
            writer.close()

    def answer(self, num_tokens: int) -> bytes:
        if self.status != 200:
            return b"HTTP/1.1 %d No\r\nContent-Length: 4\r\n\r\nsour" % self.status
        head = HEAD + b"x-warmroot-replica: r1\r\nx-warmroot-cached-tokens: 5\r\n\r\n"
        return (
            head + b"".join(chunk(b"data: {}\n\n") for _ in range(num_tokens)) + chunk(b"data: [DONE]\n\n") + chunk(b"")
        )


async def load(server: TinyServer, jobs: list[Job], concurrency: int) -> list:
    listening = await asyncio.start_server(server, "127.0.0.1", 0)
    port = listening.sockets[0].getsockname()[1]
    client = LoadClient(f"http://127.0.0.1:{port}", "m")
    try:
        served = await client.closed_loop(jobs, concurrency)
        return served + await client.open_loop(jobs[:2], [0.0, 0.001])
    finally:
        await client.close()
        listening.close()


async def test_client_measures_every_request_over_kept_connections() -> None:
    server = TinyServer()
    jobs = [Job([index], 3 + index) for index in range(6)]
    served = await load(server, jobs, 2)
    assert [len(answer.timing.token_times) for answer in served] == [3, 4, 5, 6, 7, 8, 3, 4]
    assert {(answer.replica, answer.timing.cached_tokens) for answer in served} == {("r1", 5)}
    assert sorted(server.prompts[:6]) == [[index] for index in range(6)]
    assert server.connections == 2


async def test_client_reports_refusals() -> None:
    with pytest.raises(RequestFailedError, match="status 503: sour"):
        await load(TinyServer(503), [Job([1], 2)], 1)


class FullServer(TinyServer):
    """Refuses every other request, and says when to come back."""

    def answer(self, num_tokens: int) -> bytes:
        if len(self.prompts) % 2:
            return b"HTTP/1.1 429 No\r\nretry-after-ms: 1\r\nContent-Length: 4\r\n\r\nfull"
        return super().answer(num_tokens)


async def test_a_closed_loop_comes_back_when_told() -> None:
    server = FullServer()
    listening = await asyncio.start_server(server, "127.0.0.1", 0)
    client = LoadClient(f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}", "m")
    served = await client.closed_loop([Job([1], 2), Job([2], 3)], 1)
    assert [len(answer.timing.token_times) for answer in served] == [2, 3]
    assert server.prompts == [[1], [1], [2], [2]]
    await client.close()
    listening.close()


async def test_who_is_refused_without_a_time_does_not_come_back() -> None:
    with pytest.raises(RequestRefusedError, match="sour"):
        await load(TinyServer(429), [Job([1], 2)], 1)
