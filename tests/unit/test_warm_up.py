"""What is hot is cached: copies, replicas that drain, replicas that are new."""

import asyncio
from contextlib import suppress

import numpy as np
import pytest
from engine_deployment import BLOCK, CACHED, PROMPT, Deployment
from engine_harness import NAMESPACE

from warmroot.cluster.errors import OverloadedError
from warmroot.cluster.ids import ReplicaId
from warmroot.kv_store.bus import InMemoryBus
from warmroot.kv_store.hashing import pack_tokens, salted, unpack_tokens
from warmroot.kv_store.hot_prefixes import HotPrefix
from warmroot.router import warm_up as module
from warmroot.router.policy import make_policy
from warmroot.router.policy.base import Candidates, Column
from warmroot.router.warm_up import LOWEST_PRIORITY, HotKeeper, copy_target, replay, warm_up

WHOLE = CACHED // BLOCK * BLOCK
HOT = pack_tokens(list(PROMPT.encode()[:WHOLE]))
NAMES = tuple(map(ReplicaId, ("a", "b", "c", "d")))


def hot(heat=100.0, load=0.0, tokens=HOT, salt=""):
    return HotPrefix(NAMESPACE, BLOCK, tokens, heat, load, salt)


def candidates(cached=(0, 0, 0, 0), unfinished=(0, 0, 0, 0), sent_s=(0, 0, 0, 0), kv_usage=(0, 0, 0, 0)):
    table = np.zeros((len(Column), 4))
    table[Column.MAX_NUM_SEQS] = 8
    table[Column.UNFINISHED] = unfinished
    table[Column.SENT_S] = sent_s
    table[Column.KV_USAGE] = kv_usage
    return Candidates(NAMES, table, np.array(cached, dtype=float), now=0.0)


def target(prefix, *args, caches=(True,) * 4, **columns):
    return copy_target(prefix, candidates(*args, **columns), caches)


def test_a_prefix_that_nobody_holds_gets_a_replica():
    assert target(hot()) == "a"
    assert target(hot(), cached=(WHOLE - 1, 0, 0, 0), unfinished=(2, 1, 0, 0)) == "c"
    assert target(hot(), cached=(0, WHOLE, 0, 0)) is None


@pytest.mark.parametrize(("load", "copies"), [(0.0, 1), (0.7, 1), (0.71, 2), (1.4, 2), (1.5, 3), (9.0, 13)])
def test_a_prefix_has_as_many_replicas_as_it_keeps_busy(load, copies):
    held = (WHOLE,) * 3 + (0,)
    for holders in range(1, 4):
        cached = held[3 - holders :] + (0,) * (3 - holders)
        assert (target(hot(load=load), cached=cached) is not None) == (holders < copies)


def test_the_idlest_that_can_hold_it_is_chosen():
    assert target(hot(), unfinished=(3, 1, 2, 1)) == "b"
    assert target(hot(), unfinished=(3, 1, 2, 1), caches=(True, False, True, False)) == "c"
    assert target(hot(), sent_s=(0.1, 0.1, 0, 0.1)) == "c"
    assert target(hot(), kv_usage=(0.8, 0.1, 0.8, 0.7)) == "b"
    assert target(hot(), unfinished=(6, 6, 6, 6)) is None
    assert target(hot(), caches=(False,) * 4) is None


def test_what_is_seldom_used_is_left_to_who_wants_it():
    assert target(hot(heat=WHOLE / 31.0)) is None
    assert target(hot(heat=WHOLE / 29.0)) == "a"


def test_a_replay_goes_after_all_others():
    request = replay(hot(salt="1:a:"), "x")
    assert unpack_tokens(HOT) == request.prompt_token_ids
    assert (request.priority, request.params.max_tokens, request.cache_salt) == (LOWEST_PRIORITY, 1, "1:a:")


@pytest.fixture
async def deployment():
    made = Deployment()
    await made.follow()
    return made


@pytest.fixture
def keeper(deployment):
    return HotKeeper(deployment.bus, deployment.dispatcher, "router")


def warm_ups(deployment):
    return deployment.dispatcher.routing().warm_ups


def held(deployment, name, salt="1:a:"):
    """Tokens of the prompt that the engine itself holds."""
    tokens = pack_tokens(list(PROMPT.encode()))
    return deployment.replicas[name].harness.engine.cache.match(salted(NAMESPACE, salt), tokens, 100).num_tokens


async def heat_up(deployment, key="sk-a", times=12):
    return [await deployment.ask(key) for _ in range(times)][-1][0]


async def test_the_table_on_the_bus_is_filled(deployment, keeper):
    await heat_up(deployment, times=4)
    await keeper.once()
    (prefix,) = await deployment.bus.hot(9)
    assert (prefix.tokens, prefix.salt, prefix.namespace, prefix.block_size) == (HOT, "1:a:", NAMESPACE, BLOCK)
    # three of four found it, in the 25 s since the start
    assert prefix.heat == pytest.approx(3 * WHOLE / 25.0)
    assert 0 < prefix.load < 0.01
    assert warm_ups(deployment) == 0


async def test_a_draining_replica_hands_its_hot_prefixes_over(deployment, keeper):
    home = await heat_up(deployment)
    other = {"r0": "r1", "r1": "r0"}[home]
    await keeper.once()
    assert held(deployment, other) == 0
    await deployment.drain(home)
    await keeper.once()
    assert (held(deployment, other), warm_ups(deployment)) == (WHOLE, 1)
    await deployment.follow()
    assert await deployment.ask("sk-a") == (other, WHOLE)
    await keeper.once()
    assert warm_ups(deployment) == 1
    assert deployment.dispatcher.core.in_flight.unfinished(other) == 0


async def test_a_prefix_that_outgrows_its_replica_is_copied(deployment, keeper):
    home = await heat_up(deployment)
    other = {"r0": "r1", "r1": "r0"}[home]
    await deployment.bus.put_hot("another router", [hot(load=0.9, salt="1:a:")], 60.0)
    await keeper.once()
    assert held(deployment, other) == WHOLE
    await deployment.follow()
    await keeper.once()
    assert warm_ups(deployment) == 1


async def test_two_routers_make_one_copy(deployment):
    await deployment.bus.put_hot("another router", [hot()], 60.0)
    for name in "xy":
        await HotKeeper(deployment.bus, deployment.dispatcher, name).once()
        assert warm_ups(deployment) == 1
        await deployment.follow()


async def test_a_new_replica_is_warm_before_it_is_announced(deployment, keeper):
    await heat_up(deployment, "sk-a")
    await heat_up(deployment, "sk-b")
    await deployment.bus.put_hot("another router", [hot(tokens=pack_tokens([1] * BLOCK), salt=""), hot(heat=0.1)], 60.0)
    await keeper.once()
    replica = await deployment.join("r2")

    async def run(request):
        async for _ in await replica.submit(request):
            pass

    assert await warm_up(deployment.bus, replica.info, run) == 4
    assert [held(deployment, "r2", salt) for salt in ("1:a:", "1:b:", "1:c:")] == [WHOLE, WHOLE, 0]
    assert "r2" not in deployment.dispatcher.core.fleet.names
    await deployment.follow()
    tokens = pack_tokens(list(PROMPT.encode()))
    assert deployment.membership.index.match(salted(NAMESPACE, "1:b:"), tokens, BLOCK)["r2"] == WHOLE


async def test_warming_up_takes_half_of_the_memory_and_only_what_fits(deployment):
    replica = await deployment.join("r2")
    blocks = replica.info.kv_total_blocks
    third = [pack_tokens([number] * (blocks // 3 * BLOCK)) for number in range(3)]
    await deployment.bus.put_hot("r", [hot(heat=9.0 - n, tokens=tokens) for n, tokens in enumerate(third)], 60.0)
    strange = HotPrefix(salted(NAMESPACE, "other weights"), BLOCK, HOT, 99.0)
    await deployment.bus.put_hot("s", [strange, HotPrefix(NAMESPACE, 2 * BLOCK, HOT, 99.0)], 60.0)
    seen = []

    async def run(request):
        seen.append(request.prompt_token_ids)

    assert await warm_up(deployment.bus, replica.info, run) == 1
    assert seen == [unpack_tokens(third[0])]


async def test_policies_that_do_not_look_at_prefixes_get_no_copies(deployment, keeper):
    await deployment.bus.put_hot("another router", [hot()], 60.0)
    deployment.dispatcher.core.policy = make_policy("round_robin")
    await keeper.once()
    assert warm_ups(deployment) == 0


async def test_a_replica_that_cannot_keep_it_is_not_asked_again_and_again(deployment, keeper):
    await deployment.bus.put_hot("another router", [hot()], 60.0)
    await keeper.once()
    for replica in deployment.replicas.values():
        replica.harness.engine.cache.clear()
    await deployment.follow()
    await keeper.once()
    assert warm_ups(deployment) == 1


async def test_a_replica_that_refuses_is_no_harm(deployment, keeper):
    await deployment.bus.put_hot("another router", [hot()], 60.0)

    async def refuse(request):
        raise OverloadedError("full", retry_after=1.0)

    for replica in deployment.replicas.values():
        replica.submit = refuse
    await keeper.once()
    assert [deployment.dispatcher.core.in_flight.unfinished(name) for name in ("r0", "r1")] == [0, 0]


async def test_without_replicas_and_without_a_bus_it_goes_on(monkeypatch):
    monkeypatch.setattr(module, "LOOK_S", 0.0)
    monkeypatch.setattr(module, "TELL_S", 0.0)
    deployment, calls = Deployment(), []
    told = asyncio.Event()

    class Bus(InMemoryBus):
        async def put_hot(self, source, prefixes, ttl_s):
            calls.append(source)
            if len(calls) < 3:
                raise ConnectionError("away")
            await super().put_hot(source, prefixes, ttl_s)
            told.set()

    keeper = HotKeeper(Bus(lambda: 0.0, "bus"), deployment.dispatcher, "router")
    keeper.start()
    await asyncio.wait_for(told.wait(), 10)
    keeper.close()
    with suppress(asyncio.CancelledError):
        await keeper._task
    assert set(calls) == {"router"}


async def test_who_leaves_is_seen_at_once(deployment, monkeypatch):
    monkeypatch.setattr(module, "LOOK_S", 0.0)
    home = await heat_up(deployment)
    other = {"r0": "r1", "r1": "r0"}[home]
    keeper = HotKeeper(deployment.bus, deployment.dispatcher, "router")
    await keeper.once()
    keeper.start()
    await asyncio.sleep(0.01)
    await deployment.drain(home)
    while not warm_ups(deployment):
        await asyncio.sleep(0)
    while deployment.dispatcher.core.in_flight.unfinished(other):
        await asyncio.sleep(0)
    assert held(deployment, other) == WHOLE
    keeper.close()
