"""Routers that are HTTP servers, ours among them, in front of backends that answer at once: CPU for each request.

``python -m warmroot.deploy.bench.router_http BLOCKS REPLICAS SEED PORT`` serves our ingress as ``router_ingress`` makes
it. It tokenises nothing, as the others do not, and reaches its replicas within its process.
"""

import asyncio
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec

from ...kv_store.index import PrefixIndex
from .router_ingress import PATH, application, new_loop, request_body
from .router_load import FleetLoad
from .router_measure import fill

_NUM_BACKENDS = 4
_START_S = 120.0
_WARM_UP = 50
_OPTIONS = ("--policy", "cache_aware", "--worker-startup-check-interval", "1", "--host", "127.0.0.1")
_ANSWER = json.dumps(
    {
        "id": "x",
        "object": "chat.completion",
        "created": 0,
        "model": "bench",
        "choices": [{"index": 0, "message": {"role": "assistant", "content": "A"}, "finish_reason": "length"}],
        "model_path": "bench",
        "data": [{"id": "bench", "object": "model"}],
    }
).encode()

SELVES = "warmroot"
PEERS = {"sglang-router": "sglang_router", "vllm-router": "vllm_router"}


def cpu_per_request(load: tuple[int, int, int], num_requests: int) -> dict[str, float]:
    """Milliseconds of CPU of each router that is installed; ``load``: blocks, replicas and seed of ours."""
    found = {SELVES: asyncio.run(_measure([__name__, *map(str, load)], num_requests))}
    for name, module in PEERS.items():
        if find_spec(module) is not None:
            found[name] = asyncio.run(_measure([f"{module}.launch_router"], num_requests))
    return found


async def _measure(command: Sequence[str], num_requests: int) -> float:
    """Of the process that ``python -m command`` starts; NaN where it does not come up."""
    backends = [await asyncio.start_server(_answer, "127.0.0.1", 0) for _ in range(_NUM_BACKENDS)]
    urls = [f"http://127.0.0.1:{backend.sockets[0].getsockname()[1]}" for backend in backends]
    with _running(command, urls) as (pid, port):
        if not await _answers(port):
            return float("nan")
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        await _ask(reader, writer, _WARM_UP)
        before = _cpu_s(pid)
        await _ask(reader, writer, num_requests)
        spent = _cpu_s(pid) - before
        writer.close()
    for backend in backends:
        backend.close()
    return spent / num_requests * 1e3


@contextmanager
def _running(command: Sequence[str], urls: Sequence[str]) -> Iterator[tuple[int, int]]:
    """Its process id and port."""
    port = _free_port()
    options = (
        [str(port)]
        if command[0] == __name__
        else ["--port", str(port), "--prometheus-port", str(_free_port()), *_OPTIONS, "--worker-urls", *urls]
    )
    arguments = [sys.executable, "-m", *command, *options]
    process = subprocess.Popen(arguments, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield process.pid, port
    finally:
        process.terminate()
        try:
            process.wait(5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


async def _answers(port: int) -> bool:
    """Whether it serves requests before long."""
    deadline = time.monotonic() + _START_S
    while not (served := await _serves(port)) and time.monotonic() < deadline:
        await asyncio.sleep(0.2)
    return served


async def _serves(port: int) -> bool:
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        await asyncio.wait_for(_ask(reader, writer, 1), 5.0)
    except (OSError, RuntimeError, asyncio.IncompleteReadError, asyncio.TimeoutError):
        return False
    writer.close()
    return True


async def _ask(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, times: int) -> None:
    body = request_body()
    for _ in range(times):
        writer.write(_message(f"POST {PATH} HTTP/1.1", body))
        status = await _read(reader)
        if b" 200 " not in status:
            raise RuntimeError(status.decode(errors="replace"))


async def _answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while True:
            await _read(reader)
            writer.write(_message("HTTP/1.1 200 OK", _ANSWER))
    except (OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
        writer.close()  # the router has gone, or the measurement is over


async def _read(reader: asyncio.StreamReader) -> bytes:
    """The first line of a message whose body has a length."""
    head = await reader.readuntil(b"\r\n\r\n")
    lines = head.split(b"\r\n")
    fields = dict(line.lower().split(b":", 1) for line in lines[1:] if line)
    await reader.readexactly(int(fields.get(b"content-length", b"0")))
    return lines[0]


def _message(first: str, body: bytes) -> bytes:
    head = f"{first}\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    return head.encode() + body


def _cpu_s(pid: int) -> float:
    """Seconds that all threads of a process have used."""
    with open(f"/proc/{pid}/stat") as file:
        fields = file.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def serve(blocks: int, replicas: int, seed: int, port: int) -> None:
    """Our ingress over a filled index."""
    import uvicorn

    load, index = FleetLoad(blocks, replicas, seed), PrefixIndex()
    fill(index, load.batches())
    server = uvicorn.Server(uvicorn.Config("", host="127.0.0.1", port=port, log_level="critical", lifespan="off"))

    async def run() -> None:
        server.config.app = await application(load, index)
        await server.serve()

    new_loop().run_until_complete(run())


if __name__ == "__main__":
    serve(*map(int, sys.argv[1:]))
