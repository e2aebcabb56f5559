"""What goes wrong with Redis or around it, while replicas and routers are at work."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from redis_server import RedisServer, needs_redis

from warmroot.kv_store.events import MAX_BATCH_BYTES
from warmroot.kv_store.hashing import pack_tokens
from warmroot.router.policy import RoutingRequest

from .redis_cluster import BLOCK, ROOT, RedisCluster, Router, until

pytestmark = needs_redis


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[RedisCluster]:
    server = RedisServer(tmp_path).start()
    async with AsyncExitStack() as exits:
        exits.callback(server.kill)
        yield RedisCluster(server, exits)


def prompt(topic: int, turn: int = 0) -> list[int]:
    return [topic] * (8 * BLOCK) + [1000 * topic + turn] * BLOCK


class Load:
    """Asks a router all the time; an error fails the test."""

    def __init__(self, *routers: Router) -> None:
        self.served = 0
        self._tasks = [asyncio.ensure_future(self._ask(router)) for router in routers]

    async def _ask(self, router: Router) -> None:
        while True:
            await router.ask(prompt(self.served % 7, self.served))
            self.served += 1
            await asyncio.sleep(0.005)

    async def stop(self) -> int:
        for task in self._tasks:
            assert not task.done(), task.exception()
            task.cancel()
        return self.served


async def test_two_routers_agree_and_see_what_the_other_sends(cluster: RedisCluster):
    replicas = await cluster.replicas("a", "b", "c")
    one, two = await cluster.router("one", expects=3), await cluster.router("two", expects=3)
    homes = {topic: (await one.ask(prompt(topic))).replica for topic in range(9)}
    await until(lambda: two.knows(*replicas))
    for topic, home in homes.items():
        delta = await two.ask(prompt(topic, turn=1))
        assert (delta.replica, delta.cached_tokens) == (home, 8 * BLOCK)
    await until(lambda: one.knows(*replicas))
    core = one.dispatcher.core
    tokens = prompt(99)
    await until(lambda: bool(core.peers._peers and two.dispatcher.core.peers._peers))
    question = RoutingRequest("q", len(tokens), tokens=pack_tokens(tokens))
    ticket = core.assign(question, replicas[0].name)
    others = two.dispatcher.core
    await until(lambda: others.peers.with_theirs("a", others.in_flight.account("a")).unfinished == 1)
    candidates = others.candidates(question)
    cached = dict(zip(candidates.names, candidates.cached_tokens, strict=True))
    assert (cached["a"] >= 8 * BLOCK, cached["b"], cached["c"]) == (True, 0, 0)
    core.finish(ticket)
    await until(lambda: others.peers.with_theirs("a", others.in_flight.account("a")).unfinished == 0)


async def test_redis_is_killed_and_comes_back_empty_under_load(cluster: RedisCluster):
    replicas = await cluster.replicas("a", "b", "c")
    routers = [await cluster.router(name, expects=3) for name in ("one", "two")]
    load = Load(*routers)
    await until(lambda: load.served > 50)
    cluster.server.kill()
    served = load.served
    await asyncio.sleep(2.5)
    assert load.served > served + 50
    cluster.server.start()
    fresh = await cluster.router("three", expects=3)
    assert await load.stop() > served
    took = await until(lambda: all(router.knows(*replicas) for router in [*routers, fresh]))
    assert took < 5.0
    assert all(len(router.membership.ready()) == 3 for router in routers)


async def test_redis_is_away_for_longer_than_a_lease(cluster: RedisCluster, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("warmroot.actors.event_publisher.LEASE_S", 1.5)
    [replica] = await cluster.replicas("a")
    router = await cluster.router(expects=1)
    cluster.server.kill()
    await asyncio.sleep(2.5)
    assert (await router.ask(prompt(1))).replica == "a"
    cluster.server.start()
    await asyncio.sleep(1.0)
    assert (await router.ask(prompt(1))).cached_tokens == 9 * BLOCK
    await until(lambda: router.knows(replica))


async def test_redis_is_restarted_with_its_data(tmp_path: Path):
    server = RedisServer(tmp_path, "appendonly yes", "appendfsync always").start()
    async with AsyncExitStack() as exits:
        exits.callback(server.kill)
        cluster = RedisCluster(server, exits)
        replicas = await cluster.replicas("a", "b")
        router = await cluster.router(expects=2)
        for topic in range(5):
            await router.ask(prompt(topic))
        await until(lambda: router.knows(*replicas))
        server.kill()
        for topic in range(5, 10):
            await router.ask(prompt(topic))
        server.start()
        late = await cluster.router("late", expects=2)
        await until(lambda: router.knows(*replicas) and late.knows(*replicas))
        assert (router.follower.skipped, late.follower.skipped) == (0, 0)


async def test_redis_hangs_and_goes_on(cluster: RedisCluster, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("warmroot.kv_store.redis_client.TIMEOUT_S", 1.2)
    replicas = await cluster.replicas("a", "b")
    router = await cluster.router(expects=2)
    load = Load(router)
    await until(lambda: load.served > 20)
    cluster.server.pause()
    served = load.served
    try:
        await asyncio.sleep(2.5)
    finally:
        cluster.server.resume()
    assert await load.stop() > served + 50
    await until(lambda: router.knows(*replicas))


async def test_a_stream_trimmed_past_a_slow_router(cluster: RedisCluster):
    [replica] = await cluster.replicas("a")
    router = await cluster.router(expects=1)
    for topic in range(5):
        replica.store(prompt(topic))
    await until(lambda: router.knows(replica))
    follow, router.follower.follow_once = router.follower.follow_once, lambda timeout_s: asyncio.sleep(0.01)
    await asyncio.sleep(0.6)  # the read that was under way ends
    for topic in range(5, 10):
        replica.store(prompt(topic))
        await asyncio.sleep(0.05)
    replica.evict(prompt(1))
    await asyncio.sleep(0.1)
    cluster.server.cli("xtrim", replica.bus._stream("a"), "maxlen", "1")
    router.follower.follow_once = follow
    await until(lambda: router.knows(replica))
    assert router.follower.gaps >= 1
    assert router.index.match(ROOT, pack_tokens(prompt(1)), BLOCK) == {}
    assert router.index.match(ROOT, pack_tokens(prompt(9)), BLOCK) == {"a": 9 * BLOCK}


async def test_garbage_in_a_stream_is_skipped_counted_and_named(
    cluster: RedisCluster, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("warmroot.kv_store.events.MAX_BATCH_BYTES", 2**20)
    assert MAX_BATCH_BYTES > 2**20
    replicas = await cluster.replicas("a", "b")
    router = await cluster.router(expects=2)
    for replica in replicas:
        replica.store(prompt(1))
    await until(lambda: router.knows(*replicas))
    writer = replicas[0].bus
    for number, data in enumerate([b"poison", b"\x78\x9cnonsense", b"\x00" * (2**20 + 1)]):
        async with writer._reporting():
            client = await writer._connected()
            await client.xadd(writer._stream("a"), {"batch": data}, id=f"1-{1000 * (number + 1)}")
        await until(lambda: router.follower.skipped == number + 1)  # noqa: B023
        writer._written["a"] = (1, 1000 * (number + 1))
        replicas[0].store(prompt(2 + number))
        await until(lambda: router.knows(*replicas))
    assert "skipping an event batch of a" in caplog.text
    assert "exceeds" in caplog.text


async def test_a_replica_that_died_is_forgotten_and_its_namesake_has_no_ghosts(
    cluster: RedisCluster, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("warmroot.actors.event_publisher.LEASE_S", 1.5)
    first, other = await cluster.replicas("a", "b")
    router = await cluster.router(expects=2)
    first.store(prompt(1))
    await until(lambda: router.knows(first))
    await first.die()
    await until(lambda: [member.info.replica for member in router.membership.ready()] == ["b"])
    assert (await router.ask(prompt(1))).replica == "b"
    await until(lambda: router.index.blocks_of(first.name) == 0)
    [again] = await cluster.replicas("a", epoch=2)
    await until(lambda: len(router.membership.ready()) == 2)
    again.store(prompt(3))
    await until(lambda: router.knows(again, other))
    assert router.index.match(ROOT, pack_tokens(prompt(1)), BLOCK) == {"b": 9 * BLOCK}


async def test_a_replica_that_is_restarted_at_once_has_no_ghosts(cluster: RedisCluster):
    [first] = await cluster.replicas("a")
    router = await cluster.router(expects=1)
    first.store(prompt(1))
    await until(lambda: router.knows(first))
    await first.die()
    [again] = await cluster.replicas("a", epoch=2)
    await until(lambda: [member.info.epoch for member in router.membership.ready()] == [2])
    assert router.index.match(ROOT, pack_tokens(prompt(1)), BLOCK) == {}
    assert (await router.ask(prompt(1))).cached_tokens == 0
    await until(lambda: router.knows(again))


async def test_full_memory_degrades_and_heals(cluster: RedisCluster, caplog: pytest.LogCaptureFixture):
    replicas = await cluster.replicas("a", "b")
    router = await cluster.router(expects=2)
    cluster.server.cli("config", "set", "maxmemory", "1")
    load = Load(router)
    await until(lambda: load.served > 100 and "its memory is full" in caplog.text)
    await asyncio.sleep(1.5)
    assert len(router.membership.ready()) == 2
    cluster.server.cli("config", "set", "maxmemory", "0")
    await load.stop()
    await until(lambda: router.knows(*replicas))


async def test_a_password_that_changes_later_degrades_and_heals(cluster: RedisCluster):
    replicas = await cluster.replicas("a", "b")
    router = await cluster.router(expects=2)
    load = Load(router)
    await until(lambda: load.served > 20)
    cluster.server.cli("config", "set", "requirepass", "changed")
    # Whoever is in stays in: only new connections have to say it.
    cluster.server.cli("client", "kill", "type", "normal", "skipme", "yes", secret="changed")
    await until(lambda: "assword" in router.follower.fault or "uthentic" in router.follower.fault)
    assert "changed" not in router.follower.fault
    served = load.served
    await until(lambda: load.served > served + 50)
    assert len(router.membership.ready()) == 2
    cluster.server.cli("config", "set", "requirepass", "", secret="changed")
    await until(lambda: not router.follower.fault)
    await load.stop()
    await until(lambda: router.knows(*replicas))


async def test_clocks_that_are_hours_apart_change_nothing(cluster: RedisCluster):
    hour = 3600 * 10**9
    [late] = await cluster.replicas("late", epoch=50 * hour)
    [early] = await cluster.replicas("early", epoch=1 * hour)
    routers = [await cluster.router(f"{ahead_s}", expects=2, ahead_s=ahead_s) for ahead_s in (-7200.0, 0.0, 7200.0)]
    late.store(prompt(1))
    early.store(prompt(2))
    for router in routers:
        await until(lambda: router.knows(late, early))  # noqa: B023
        answers = [await router.ask(prompt(topic, turn=1)) for topic in (1, 2)]
        assert [answer.replica for answer in answers] == ["late", "early"]
        assert min(answer.cached_tokens or 0 for answer in answers) >= 8 * BLOCK
    # A word of one router counts with the others for as long as it says, by their own clocks.
    await until(lambda: all(len(router.dispatcher.core.peers._peers) == 2 for router in routers))
    await late.stop()
    for router in routers:
        await until(lambda: [one.info.replica for one in router.membership.ready()] == ["early"])  # noqa: B023


async def test_a_replica_may_start_before_redis(cluster: RedisCluster):
    cluster.server.kill()
    replicas = await cluster.replicas("a")
    replicas[0].store(prompt(1))
    cluster.server.start()
    router = await cluster.router(expects=1)
    await until(lambda: router.knows(*replicas))


async def test_a_router_in_step_pays_nothing_for_the_snapshot_of_another(cluster: RedisCluster):
    [replica] = await cluster.replicas("a")
    router = await cluster.router(expects=1)
    replica.store(prompt(1))
    await until(lambda: router.knows(replica))
    snapshots = replica.snapshots
    before = router.index._replicas["a"].next_seq
    await router.bus.request_snapshot("a")
    await until(lambda: replica.snapshots > snapshots and router.index._replicas["a"].next_seq > before)
    assert not router.index._replicas["a"].loading
    assert router.knows(replica)
