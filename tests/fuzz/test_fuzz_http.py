"""HTTP clients that are slow, broken, hostile or gone, over real sockets: the server lives and all blocks are free."""

import asyncio
import threading

import httpx
import pytest
import uvicorn
from fuzz_api import TinyApi
from fuzz_clients import BROKEN, GET, HEAD, REQUEST, STREAM, talk


class Listening(TinyApi):
    """The API behind a real server on loopback."""

    def __init__(self) -> None:
        super().__init__()
        config = uvicorn.Config(self.app, host="127.0.0.1", port=0, log_level="critical", lifespan="off")
        self.server = uvicorn.Server(config)
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


async def test_gone_at_every_byte_of_the_request(api):
    await asyncio.gather(*(talk(api.port, REQUEST[:at], reads=0) for at in range(0, len(REQUEST), 3)))
    await asyncio.to_thread(api.check_alive)


async def test_gone_at_every_part_of_the_answer(api):
    whole = len(await talk(api.port, REQUEST))
    assert whole > 2000
    for first in range(1, whole, 640):  # a few at a time: connections beyond the queue are no part of this
        await asyncio.gather(*(talk(api.port, REQUEST, reads=at) for at in range(first, min(whole, first + 640), 80)))
    await asyncio.to_thread(api.check_alive)


async def test_slow_loris(api):
    """Headers and bodies that come byte by byte hold nothing but their connection, and others do not wait."""
    slow = [
        asyncio.create_task(talk(api.port, *(bytes([byte]) for byte in whole[:60]), pause_s=0.01))
        for whole in (REQUEST, GET, HEAD + b"Content-Length: 1000\r\n\r\n", b"X" * 60)
        for _ in range(20)
    ]
    for _ in range(3):
        await asyncio.to_thread(api.check_alive)
    await asyncio.gather(*slow)
    await asyncio.to_thread(api.check_alive)


async def test_half_closed(api):
    """A client that sends no more still reads: it gets the whole answer, or none; nothing is held either way."""
    heard = await talk(api.port, REQUEST, half_close=True)
    assert not heard or heard.startswith(b"HTTP/1.1 200")
    await talk(api.port, REQUEST[:-5], half_close=True)
    await asyncio.to_thread(api.check_alive)


async def test_pipelined(api):
    """Requests sent before the first is answered are answered in order."""
    heard = await talk(api.port, GET * 3 + REQUEST + GET)
    assert heard.count(b"HTTP/1.1 200 OK") == 5 and heard.count(b"[DONE]") == 1
    await talk(api.port, REQUEST * 5, reads=1000)
    await asyncio.to_thread(api.check_alive)


@pytest.mark.parametrize("data", BROKEN, ids=range(len(BROKEN)))
async def test_broken_requests(api, data):
    """An error of the client's, a refusal to read on, or an answer as always; never a 500."""
    heard = await talk(api.port, data)
    assert not heard or heard.startswith(b"HTTP/1.1 "), heard[:200]
    status = int(heard.split(b" ", 2)[1]) if heard else 0
    assert status < 500, heard[:500]
    await asyncio.to_thread(api.check_alive)


async def test_storm(api):
    """Hundreds of connections at once, most of which never say a thing."""
    await asyncio.gather(
        *(talk(api.port, reads=0) for _ in range(200)), *(talk(api.port, REQUEST, reads=100) for _ in range(60))
    )
    await asyncio.to_thread(api.check_alive)
