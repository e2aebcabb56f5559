"""Requests that come before there is a replica are held, within a limit, and served by the first one: over HTTP."""

import asyncio

import httpx
import pytest
from engine_deployment import PROMPT, Deployment

BODY = {"prompt": PROMPT, "max_tokens": 2}
HEADERS = {"authorization": "Bearer sk"}


@pytest.fixture
async def client():
    deployment = Deployment()
    async with httpx.AsyncClient(transport=httpx.ASGITransport(deployment.app), base_url="http://test") as client:
        yield deployment, client


async def complete(client):
    return await client.post("/v1/completions", json=BODY, headers=HEADERS)


async def test_requests_wait_for_the_first_replica(client):
    """kserve #1805, #2882, ai-gateway #2327: not 503, not "not ready", not a timeout."""
    deployment, http = client
    waiting = [asyncio.ensure_future(complete(http)) for _ in range(5)]
    await asyncio.sleep(0.05)
    assert not any(task.done() for task in waiting)
    assert (await http.get("/health")).status_code == 503  # a probe is told at once
    assert (await http.get("/livez")).status_code == 200  # and nobody ends the pod for it
    await deployment.follow()
    answers = await asyncio.wait_for(asyncio.gather(*waiting), 30)
    assert [answer.status_code for answer in answers] == [200] * 5
    assert (await http.get("/health")).status_code == 200


async def test_they_wait_again_when_the_last_one_has_gone(client):
    deployment, http = client
    await deployment.follow()
    gone = dict(deployment.replicas)
    for name in gone:
        await deployment.drain(name)
    waiting = asyncio.ensure_future(complete(http))
    await asyncio.sleep(0.05)
    assert not waiting.done()
    await deployment.join("r9")
    await deployment.follow()
    assert (await asyncio.wait_for(waiting, 30)).headers["x-warmroot-replica"] == "r9"


async def test_nobody_waits_beyond_the_limit(client):
    deployment, http = client
    deployment.dispatcher._wait_s = 0.05
    answer = await asyncio.wait_for(complete(http), 30)
    assert answer.status_code == 503
    assert answer.json()["error"]["code"] == "replica_unavailable"
    assert deployment.dispatcher.core.num_waiting == 0


async def test_a_client_that_leaves_while_it_waits_leaves_nothing_behind(client):
    deployment, http = client
    waiting = asyncio.ensure_future(complete(http))
    await asyncio.sleep(0.02)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    await deployment.follow()
    assert all(not replica.harness.deltas for replica in deployment.replicas.values())
    assert not deployment.dispatcher.core.in_flight._accounts
