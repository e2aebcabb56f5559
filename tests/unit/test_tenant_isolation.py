"""Tenants with equal prompts, from the API key to the blocks of two engines: HTTP, dispatcher, index and caches."""

import asyncio
import json

import httpx
import pytest
from engine_deployment import BLOCK, CACHED, PROMPT, Deployment
from engine_harness import NAMESPACE

from warmroot.kv_store.hashing import pack_tokens, salted
from warmroot.router.membership import Membership
from warmroot.router.warm_up import HotKeeper, warm_up


@pytest.fixture
async def deployment():
    made = Deployment()
    await made.follow()
    return made


async def test_equal_prompts_of_two_tenants_never_meet(deployment):
    home, cached = await deployment.ask("sk-a")
    assert cached == 0
    assert await deployment.ask("sk-a") == (home, CACHED)
    assert await deployment.ask("sk-a2") == (home, CACHED)
    for key in ("sk-b", "sk"):
        where, cached = await deployment.ask(key)
        assert cached == 0
        assert await deployment.ask(key) == (where, CACHED)


@pytest.mark.parametrize("salt", ["1:a:", "a", "1:a:1:a:", ":a:", "0:1:a:"])
async def test_no_salt_of_a_client_is_another_tenants(deployment, salt):
    await deployment.ask("sk-a")
    await deployment.ask("sk-a", cache_salt="mine")
    for key in ("sk-b", "sk"):
        assert (await deployment.ask(key, cache_salt=salt))[1] == 0
        assert (await deployment.ask(key, cache_salt="mine"))[1] == 0


async def test_a_salt_divides_a_tenant(deployment):
    home, _ = await deployment.ask("sk-a", cache_salt="x")
    assert (await deployment.ask("sk-a", cache_salt="y"))[1] == 0
    assert await deployment.ask("sk-a2", cache_salt="x") == (home, CACHED)


async def test_the_routers_index_keeps_them_apart(deployment):
    home, _ = await deployment.ask("sk-a")
    index, tokens = deployment.membership.index, pack_tokens(list(PROMPT.encode()))
    assert index.match(salted(NAMESPACE, "1:a:"), tokens, BLOCK) == {home: 16}
    for other in (NAMESPACE, salted(NAMESPACE, "1:b:"), salted(NAMESPACE, "a")):
        assert index.match(other, tokens, BLOCK) == {}


async def test_a_prefix_in_flight_counts_only_for_its_tenant(deployment):
    await asyncio.gather(*(deployment.ask(key) for key in ("sk-a", "sk-b")))
    decisions = {tuple(decision.cached.values()) for decision in deployment.dispatcher.decisions}
    assert decisions == {(0, 0)}


async def test_what_is_warmed_up_for_one_tenant_is_cold_for_the_other(deployment):
    """Hot prefixes on the bus, replicas that join late, those that drain, and routers that start late."""
    for _ in range(3):
        await deployment.ask("sk-a")
    keeper = HotKeeper(deployment.bus, deployment.dispatcher, "router")
    await keeper.once()
    replica = await deployment.join("r2")

    async def run(request):
        async for _ in await replica.submit(request):
            pass

    assert await warm_up(deployment.bus, replica.info, run) == 1
    await deployment.follow()
    for name in ("r0", "r1"):
        await deployment.drain(name)
    late = Membership(deployment.bus, "", connect=lambda info, on_change: deployment.replicas[info.replica])
    await late.follower.follow_once(0.0)
    tokens = pack_tokens(list(PROMPT.encode()))
    for membership in (deployment.membership, late):
        assert membership.index.match(salted(NAMESPACE, "1:a:"), tokens, BLOCK)["r2"] == 16
        assert membership.index.match(salted(NAMESPACE, "1:b:"), tokens, BLOCK) == {}
        assert membership.index.match(NAMESPACE, tokens, BLOCK) == {}
    assert await deployment.ask("sk-b") == ("r2", 0)
    assert await deployment.ask("sk") == ("r2", 0)
    assert (await deployment.ask("sk-a"))[1] >= 16


async def test_why_a_request_went_there_tells_nothing_of_other_tenants(deployment):
    """A request's explanation counts its own tenant's prefixes only, whatever id it chose."""
    await deployment.ask("sk-a")
    transport = httpx.ASGITransport(deployment.app)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:

        async def explained(key):
            headers = {"authorization": f"Bearer {key}", "x-request-id": "same", "x-warmroot-explain": "1"}
            body = {"prompt": PROMPT, "max_tokens": 2, "session_id": "same"}
            response = await client.post("/v1/completions", json=body, headers=headers)
            return json.loads(response.headers["x-warmroot-routing"])

        of_a, of_b = await explained("sk-a"), await explained("sk-b")
    assert max(candidate["cached_tokens"] for candidate in of_a["candidates"]) >= 16
    assert [candidate["cached_tokens"] for candidate in of_b["candidates"]] == [0, 0]
    assert (of_b["predicted_tokens"], of_b["actual_tokens"]) == (0, 0)
    assert of_a["request_id"] != of_b["request_id"]
