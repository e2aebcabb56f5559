"""HTTP clients that are slow, broken, hostile or gone, over real sockets: the server lives and all blocks are free."""

import asyncio
import json
import threading
from contextlib import suppress

import httpx
import pytest
import uvicorn
from fuzz_api import TinyApi

STREAM = {"model": "tiny", "prompt": "hello", "max_tokens": 60, "ignore_eos": True, "stream": True, "temperature": 0}
BODY = json.dumps(STREAM).encode()
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
REQUEST = HEAD + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY
GET = b"GET /livez HTTP/1.1\r\nHost: x\r\n\r\n"


class Listening(TinyApi):
    """The API behind a real server on loopback."""

    def __init__(self) -> None:
        super().__init__()
        config = uvicorn.Config(self.app, host="127.0.0.1", port=0, log_level="critical", lifespan="off")
        self.server = uvicorn.Server(config)
        self.server.install_signal_handlers = lambda: None
        started = threading.Event()
        self._serving = asyncio.run_coroutine_threadsafe(self._serve(started), self.loop)
        assert started.wait(20)
        self.port = self.server.servers[0].sockets[0].getsockname()[1]

    async def _serve(self, started: threading.Event) -> None:
        serving = asyncio.create_task(self.server.serve())
        while not self.server.started:
            await asyncio.sleep(0.005)
        started.set()
        await serving

    def close(self) -> None:
        self.server.should_exit = self.server.force_exit = True
        self._serving.result(20)
        super().close()

    def check_alive(self) -> None:
        """It answers as always, and holds nothing."""
        body = {**STREAM, "stream": False, "max_tokens": 3}
        answer = httpx.post(f"http://127.0.0.1:{self.port}/v1/completions", json=body, trust_env=False)
        assert answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] == 3
        self.check_idle()


@pytest.fixture(scope="module")
def api():
    api = Listening()
    yield api
    api.close()


async def talk(api, *parts: bytes, pause_s: float = 0.0, reads: int = 2**20, half_close: bool = False) -> bytes:
    """What the server says to these bytes, until it closes or says nothing more; then the connection breaks."""
    reader, writer = await asyncio.open_connection("127.0.0.1", api.port)
    heard = b""
    with suppress(OSError, asyncio.TimeoutError):
        for part in parts:
            writer.write(part)
            await writer.drain()
            await asyncio.sleep(pause_s)
        if half_close:
            writer.write_eof()
        while len(heard) < reads:
            more = await asyncio.wait_for(reader.read(min(4096, reads - len(heard))), 0.5)
            if not more:
                break
            heard += more
    writer.transport.abort()
    return heard


async def test_gone_at_every_byte_of_the_request(api):
    await asyncio.gather(*(talk(api, REQUEST[:at], reads=0) for at in range(0, len(REQUEST), 3)))
    await asyncio.to_thread(api.check_alive)


async def test_gone_at_every_part_of_the_answer(api):
    whole = len(await talk(api, REQUEST))
    assert whole > 2000
    for first in range(1, whole, 640):  # a few at a time: connections beyond the queue are no part of this
        await asyncio.gather(*(talk(api, REQUEST, reads=at) for at in range(first, min(whole, first + 640), 80)))
    await asyncio.to_thread(api.check_alive)


async def test_slow_loris(api):
    """Headers and bodies that come byte by byte hold nothing but their connection, and others do not wait."""
    slow = [
        asyncio.create_task(talk(api, *(bytes([byte]) for byte in whole[:60]), pause_s=0.01))
        for whole in (REQUEST, GET, HEAD + b"Content-Length: 1000\r\n\r\n", b"X" * 60)
        for _ in range(20)
    ]
    for _ in range(3):
        await asyncio.to_thread(api.check_alive)
    await asyncio.gather(*slow)
    await asyncio.to_thread(api.check_alive)


async def test_half_closed(api):
    """A client that sends no more still reads: it gets the whole answer, or none; nothing is held either way."""
    heard = await talk(api, REQUEST, half_close=True)
    assert not heard or heard.startswith(b"HTTP/1.1 200")
    await talk(api, REQUEST[:-5], half_close=True)
    await asyncio.to_thread(api.check_alive)


async def test_pipelined(api):
    """Requests sent before the first is answered are answered in order."""
    heard = await talk(api, GET * 3 + REQUEST + GET)
    assert heard.count(b"HTTP/1.1 200 OK") == 5 and heard.count(b"[DONE]") == 1
    await talk(api, REQUEST * 5, reads=1000)
    await asyncio.to_thread(api.check_alive)


CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(
    "data",
    [
        b"GET /livez HTTP/1.1\r\nHost: x\r\nX: " + b"a" * 200_000 + b"\r\n\r\n",
        b"GET /livez HTTP/1.1\r\nHost: x\r\n" + b"".join(b"X%d: a\r\n" % n for n in range(20_000)) + b"\r\n",
        b"GET /" + b"a" * 200_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
        CHUNKED + b"zz\r\n" + BODY,
        CHUNKED + b"-5\r\nabcde\r\n0\r\n\r\n",
        CHUNKED + b"ffffffffffffffffff\r\nabc\r\n",
        CHUNKED + b"7fffffff\r\nabc",
        CHUNKED + b"%x\r\n%s" % (len(BODY), BODY) + b"junk instead of a line end",
        CHUNKED + b"0\r\n\r\n",
        HEAD + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\nGET /livez HTTP/1.1\r\n\r\n",
        HEAD + b"Content-Length: -1\r\n\r\n" + BODY,
        HEAD + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\n" + BODY,
        HEAD + b"Content-Length: " + b"9" * 5000 + b"\r\n\r\n" + BODY,
        HEAD + b"Content-Length: 99999999999\r\n\r\n" + BODY,
        HEAD + b"Expect: 100-continue\r\nContent-Length: 3\r\n\r\n{}",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(500),  # a TLS greeting
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"\x00" * 5000,
        b"\r\n" * 5000,
        b"GET\x00 /livez HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET /livez%00%ff/../../etc/passwd?\xff=\xfe HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET /v1/models/%ff%00 HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer \xff\xfe\r\n\r\n",
        b"OPTIONS * HTTP/1.1\r\nHost: x\r\n\r\n",
        b"CONNECT x:1 HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET /v1/models HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        b"Sec-WebSocket-Key: x\r\nSec-WebSocket-Version: 13\r\n\r\n",
        HEAD + b"Content-Encoding: gzip\r\nContent-Length: %d\r\n\r\n" % len(BODY) + BODY,
        HEAD.replace(b"json", b"json; charset=utf-16") + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY,
    ],
    ids=range(27),
)
async def test_broken_requests(api, data):
    """An error of the client's, a refusal to read on, or an answer as always; never a 500."""
    heard = await talk(api, data)
    assert not heard or heard.startswith(b"HTTP/1.1 "), heard[:200]
    status = int(heard.split(b" ", 2)[1]) if heard else 0
    assert status < 500, heard[:500]
    await asyncio.to_thread(api.check_alive)


async def test_storm(api):
    """Hundreds of connections at once, most of which never say a thing."""
    await asyncio.gather(*(talk(api, reads=0) for _ in range(200)), *(talk(api, REQUEST, reads=100) for _ in range(60)))
    await asyncio.to_thread(api.check_alive)
