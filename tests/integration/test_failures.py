"""A replica is killed while it serves. This comes last: it leaves a cluster that others have to wait for."""

import asyncio
import json
import os
import signal
from typing import Any

import httpx
import pytest

from warmroot.actors.embedded_bus import find_bus
from warmroot.actors.models.source import resolve_model
from warmroot.kv_store.hashing import pack_tokens
from warmroot.router.tokenizer import Tokenizer

from .cluster_harness import Cluster, wait_until

pytestmark = [pytest.mark.cluster, pytest.mark.model]

HOT = "A polite assistant who knows everything about bottles and beer answers. " * 12
STREAM = {"model": "smollm2", "max_tokens": 600, "ignore_eos": True, "stream": True}


async def read_stream(
    client: httpx.AsyncClient, number: int, started: asyncio.Event
) -> tuple[str, dict[str, Any] | None]:
    """The replica that served it, and the error that ended it, if one did."""
    # Long enough that its prefill weighs in the choice of a replica: both must get some.
    body = STREAM | {"prompt": f"{number} bottles of beer on the wall. " * 15}
    chunks: list[str] = []
    async with client.stream("POST", "/v1/completions", json=body) as response:
        assert response.status_code == 200
        async for line in response.aiter_lines():
            started.set()
            chunks += [line.removeprefix("data: ")] if line else []
    error = None if chunks[-1] == "[DONE]" else json.loads(chunks[-1])["error"]
    return response.headers["x-warmroot-replica"], error


async def test_a_killed_replica_fails_its_own_requests_and_comes_back(cluster: Cluster):
    cluster.wait_idle()
    before = cluster.replicas()
    victim = before[0].info
    async with httpx.AsyncClient(base_url=cluster.url, timeout=120, trust_env=False) as client:
        await heat(client)
        started = [asyncio.Event() for _ in range(12)]
        streams = [asyncio.create_task(read_stream(client, *numbered)) for numbered in enumerate(started)]
        while sum(event.is_set() for event in started) < 4:  # there is room for four, and none is through by then
            await asyncio.sleep(0.01)
        os.kill(victim.pid, signal.SIGKILL)
        ends = await asyncio.wait_for(asyncio.gather(*streams), 120)
        assert len({replica for replica, _ in ends}) == 2
        for replica, error in ends:
            if replica == victim.replica:
                assert error is not None
                assert (error["type"], error["code"]) == ("service_unavailable", "replica_unavailable")
            else:
                assert error is None
        await check_only_others_serve(client, victim.replica)
    wait_until(lambda: len(cluster.replicas()) == 2, 120, cluster.handle.replicas)
    known = {replica.info.replica for replica in before}
    (new,) = {replica.info.replica for replica in cluster.replicas()} - known
    await asyncio.sleep(1.0)  # the ingress reads the bus for itself
    await check_is_warm(cluster, new)
    await check_all_serve(cluster)
    cluster.wait_idle()


async def heat(client: httpx.AsyncClient) -> None:
    """Use a prefix until the cluster knows that it is hot: others may be, from earlier tests."""
    bus = find_bus()
    assert bus is not None
    beginning = pack_tokens(Tokenizer.from_path(resolve_model("smollm2")).encode(HOT)[:128])
    for number in range(100):
        response = await client.post(
            "/v1/completions", json={"model": "smollm2", "prompt": f"{HOT}{number}", "max_tokens": 1}
        )
        assert response.status_code == 200, response.text
        if any(prefix.tokens.startswith(beginning) for prefix in await bus.hot(16)):
            return
        await asyncio.sleep(0.5)
    raise AssertionError("no router tells what is hot")


async def check_is_warm(cluster: Cluster, replica: str) -> None:
    """It has the prefix without having been asked for it."""
    async with httpx.AsyncClient(base_url=cluster.url, timeout=120, trust_env=False) as client:
        response = await client.post(
            "/v1/completions",
            json={"model": "smollm2", "prompt": f"{HOT}What?", "max_tokens": 1},
            headers={"x-warmroot-explain": "1"},
        )
    candidates = json.loads(response.headers["x-warmroot-routing"])["candidates"]
    (cached,) = [one["cached_tokens"] for one in candidates if one["replica"] == replica]
    assert cached >= 128, candidates


async def check_only_others_serve(client: httpx.AsyncClient, victim: str) -> None:
    for number in range(10):
        response = await client.post(
            "/v1/completions", json={"model": "smollm2", "prompt": f"{number} green", "max_tokens": 2}
        )
        assert response.status_code == 200, response.text
        assert response.headers["x-warmroot-replica"] != victim


async def check_all_serve(cluster: Cluster) -> None:
    expected = {replica.info.replica for replica in cluster.replicas()}
    async with httpx.AsyncClient(base_url=cluster.url, timeout=120, trust_env=False) as client:
        requests = [
            client.post("/v1/completions", json={"model": "smollm2", "prompt": f"{number} red", "max_tokens": 8})
            for number in range(16)
        ]
        served = {response.headers["x-warmroot-replica"] for response in await asyncio.gather(*requests)}
    assert served == expected
