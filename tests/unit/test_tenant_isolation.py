"""Tenants with equal prompts, from the API key to the blocks of two engines: HTTP, dispatcher, index and caches."""

import asyncio

import pytest
from engine_deployment import BLOCK, CACHED, PROMPT, Deployment
from engine_harness import NAMESPACE

from warmroot.kv_store.hashing import pack_tokens, salted


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
