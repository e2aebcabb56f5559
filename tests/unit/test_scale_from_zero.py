"""Requests that come before there is a replica are held, within a limit, and served by the first one: over HTTP."""

import asyncio

import httpx
import pytest
from engine_deployment import PROMPT, Deployment
from openai_harness import listening

from warmroot.router.admission import QueueLimits

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


async def test_so_many_wait_as_one_replica_may_have_queued_and_the_others_know_when_to_come_back():
    deployment = Deployment(QueueLimits(max_requests=3))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(deployment.app), base_url="http://test") as http:
        waiting = [asyncio.ensure_future(complete(http)) for _ in range(3)]
        await asyncio.sleep(0.05)
        stats = deployment.dispatcher.routing()
        assert (stats.waiting, stats.waiting_tokens) == (3, 3 * len(PROMPT))  # what scaling goes by
        deployment.now = 12.0
        refused = await complete(http)
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "18")  # 30 s to start, 12 s are over
        assert refused.json()["error"]["code"] == "rate_limit_exceeded"
        assert deployment.dispatcher.routing().refused["full"] == 1
        await deployment.follow()
        # Nobody who was let in is refused when the queue of the replica turns out to be full.
        assert [answer.status_code for answer in await asyncio.wait_for(asyncio.gather(*waiting), 30)] == [200] * 3
        assert deployment.dispatcher.routing().waiting == 0
        for name in dict(deployment.replicas):
            await deployment.drain(name)
        waiting = [asyncio.ensure_future(complete(http)) for _ in range(3)]
        await asyncio.sleep(0.05)
        assert (await complete(http)).headers["retry-after"] == "17"  # as long as the first one took
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        assert deployment.dispatcher.routing().waiting_tokens == 0


async def test_prompts_of_one_request_get_in_together_or_not_at_all():
    deployment = Deployment(QueueLimits(max_tokens=100))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(deployment.app), base_url="http://test") as http:
        first = asyncio.ensure_future(complete(http))
        await asyncio.sleep(0.02)
        many = await http.post("/v1/completions", json=BODY | {"prompt": ["x" * 45] * 2}, headers=HEADERS)
        assert many.status_code == 429
        few = asyncio.ensure_future(
            http.post("/v1/completions", json=BODY | {"prompt": ["x" * 40] * 2}, headers=HEADERS)
        )
        await asyncio.sleep(0.02)
        await deployment.follow()
        assert [(await asyncio.wait_for(task, 30)).status_code for task in (first, few)] == [200, 200]


async def test_a_stream_that_waits_is_kept_alive():
    """Proxies cut a connection on which nothing comes for a minute; loading a model may take several."""
    deployment = Deployment(keep_alive_s=0.02)
    async with listening(deployment.app) as url, httpx.AsyncClient(base_url=url, headers=HEADERS) as http:
        async with http.stream("POST", "/v1/completions", json=BODY | {"stream": True}) as response:
            assert response.status_code == 200
            lines = response.aiter_lines()
            assert [await anext(lines) for _ in range(3)] == [": keep-alive", "", ": keep-alive"]
            await deployment.follow()
            events = [line async for line in lines if line.startswith("data: ")]
        assert events[-1] == "data: [DONE]" and '"finish_reason":"length"' in "".join(events)


async def test_no_replica_is_no_fault_where_one_starts_for_a_request():
    deployment = Deployment(waits_for_replicas=True)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(deployment.app), base_url="http://test") as http:
        assert (await http.get("/health")).status_code == 200
        models = await http.get("/v1/models", headers=HEADERS)
        assert [card["max_model_len"] for card in models.json()["data"]] == [256]
        tokens = await http.post("/tokenize", json={"model": "m", "prompt": "abc"}, headers=HEADERS)
        assert tokens.json()["count"] == 3
