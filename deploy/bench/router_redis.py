"""A redis-server of one's own on a free port of loopback, and the start of a router over it."""

import asyncio
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from ...cluster.metadata_store import RedisAddress
from ...kv_store.redis_bus import RedisEventBus
from .router_load import FleetLoad
from .router_measure import Joined, join, publish_snapshots

_START_S = 10.0


def join_over_redis(load: FleetLoad, prompts: Sequence[bytes]) -> Joined | None:
    """``join`` over Redis; None where there is no redis-server."""

    async def run(address: RedisAddress) -> Joined:
        replicas, router = RedisEventBus(address), RedisEventBus(address)
        try:
            await publish_snapshots(replicas, load)
            return await join(router, load, prompts)
        finally:
            await replicas.close()
            await router.close()

    with redis_server() as address:
        return None if address is None else asyncio.run(run(address))


@contextmanager
def redis_server() -> Iterator[RedisAddress | None]:
    """An empty server, ended with the context; None where there is no redis-server."""
    binary = shutil.which("redis-server")
    if binary is None:
        yield None
        return
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        options = ("--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", folder)
        server = subprocess.Popen([binary, *options], stdout=subprocess.DEVNULL)
        try:
            _wait_for(port)
            yield RedisAddress(hosts=(("127.0.0.1", port),))
        finally:
            server.terminate()
            server.wait()


def _wait_for(port: int) -> None:
    deadline = time.monotonic() + _START_S
    while True:
        with socket.socket() as probe:
            if not probe.connect_ex(("127.0.0.1", port)):
                return
        if time.monotonic() > deadline:
            raise ConnectionError("redis-server does not listen")
        time.sleep(0.02)
