"""Limits per minute: buckets in a process and in Redis, what ingresses share, what one request takes."""

import math

import pytest
from manual_clock import ManualClock
from redis_server import BINARY, RedisServer

from warmroot.cluster.errors import RateLimitError
from warmroot.cluster.metadata_store import parse_store
from warmroot.kv_store.quota import LocalQuota, Spend
from warmroot.kv_store.redis_bus import RedisEventBus
from warmroot.router.tenancy.principal import Principal
from warmroot.router.tenancy.rate_limits import Quota, RateLimiter, duration, is_limited


@pytest.fixture(scope="module")
def redis(tmp_path_factory):
    if BINARY is None:
        pytest.skip("redis-server is not installed")
    server = RedisServer(tmp_path_factory.mktemp("quota")).start()
    yield server
    server.kill()


@pytest.fixture
def clock():
    return ManualClock()


@pytest.fixture(params=["local", "redis"])
async def quota(request, clock):
    if request.param == "local":
        yield LocalQuota(clock)
        return
    server = request.getfixturevalue("redis")
    bus = RedisEventBus(parse_store(f"{server.url}?prefix=quota-{request.node.name.partition('[')[0]}"))
    yield bus
    await bus.close()


def near(value):
    """Redis's clock goes on by itself."""
    return pytest.approx(value, abs=0.5)


async def test_a_bucket_is_full_at_first_and_empties(quota):
    assert await quota.spend([Spend("b", 3, 10)]) == (True, [near(7)], [0.0])
    assert await quota.spend([Spend("b", 6, 10)]) == (True, [near(1)], [0.0])
    done, levels, waits = await quota.spend([Spend("b", 4, 10)])
    assert (done, levels, waits) == (False, [near(1)], [pytest.approx(18, abs=3)])
    assert await quota.spend([Spend("other", 4, 10)]) == (True, [near(6)], [0.0])


async def test_all_or_nothing(quota):
    await quota.spend([Spend("empty", 5, 5)])
    done, levels, waits = await quota.spend([Spend("full", 2, 100), Spend("empty", 1, 5)])
    assert (done, levels) == (False, [near(100), near(0)])
    assert (waits[0], waits[1]) == (0.0, pytest.approx(12, abs=3))


async def test_what_is_forced_makes_debts_and_what_is_given_back_fills(quota):
    assert await quota.spend([Spend("b", 25, 10)], force=True) == (True, [near(-15)], [0.0])
    done, _, [wait_s] = await quota.spend([Spend("b", 1, 10)])
    assert (done, wait_s) == (False, pytest.approx(96, abs=3))
    assert await quota.spend([Spend("b", -20, 10)], force=True) == (True, [near(5)], [0.0])
    assert await quota.spend([Spend("b", -20, 10)], force=True) == (True, [near(10)], [0.0])


async def test_more_than_a_minutes_worth_waits_for_a_full_bucket(quota):
    assert await quota.spend([Spend("b", 30, 10)]) == (True, [near(-20)], [0.0])
    done, _, [wait_s] = await quota.spend([Spend("b", 30, 10)])
    assert (done, wait_s) == (False, pytest.approx(180, abs=3))


async def test_redis_forgets_a_bucket_that_is_full(redis):
    bus = RedisEventBus(parse_store(f"{redis.url}?prefix=forget"))
    await bus.spend([Spend("b", 5, 10)])
    assert 29_000 <= int(redis.cli("PTTL", "{forget}:quota:b")) <= 31_000
    await bus.close()


@pytest.mark.parametrize("cost", [1, 3, 7, 20])
async def test_the_wait_is_true(clock, cost):
    quota = LocalQuota(clock)
    for _ in range(20):
        clock.now += 1000.1
        await quota.spend([Spend("b", 7, 7)])
        _, _, [wait_s] = await quota.spend([Spend("b", cost, 7)])
        before = clock.now
        clock.now = before + wait_s - 0.001
        assert not (await quota.spend([Spend("b", cost, 7)])).done
        clock.now = before + wait_s
        assert (await quota.spend([Spend("b", cost, 7)])).done


async def test_over_time_no_more_is_used_than_the_limit(clock):
    quota, used = LocalQuota(clock), 0
    for second in range(600):
        clock.now = float(second)
        for cost in (1, 5, 40):
            if (await quota.spend([Spend("b", cost, 30)])).done:
                used += cost
    assert used <= 30 * 10 + 30 + 40
    assert used >= 30 * 10


KEY = Principal(name="k", requests_per_minute=60, tokens_per_minute=600)


async def test_ingresses_without_a_store_keep_a_part_each(clock):
    limiters = [RateLimiter(clock, None, 3) for _ in range(3)]

    async def passed(limiter):
        count = 0
        while True:
            try:
                await Quota(limiter, KEY).take_request()
            except RateLimitError:
                return count
            count += 1

    assert [await passed(limiter) for limiter in limiters] == [20, 20, 20]


class Store:
    """A shared store that may be away."""

    def __init__(self, clock):
        self.quota, self.away, self.asked = LocalQuota(clock), False, 0

    async def spend(self, spends, *, force=False):
        self.asked += 1
        if self.away:
            raise ConnectionError("gone")
        return await self.quota.spend(spends, force=force)


async def test_ingresses_share_what_the_store_keeps_and_go_on_without_it(clock, caplog):
    store = Store(clock)
    one, other = (RateLimiter(clock, store, 2) for _ in range(2))
    for limiter in (one, other) * 30:
        await Quota(limiter, KEY).take_request()
    with pytest.raises(RateLimitError):
        await Quota(one, KEY).take_request()
    store.away = True
    for _ in range(30):  # its own half
        await Quota(one, KEY).take_request()
    with pytest.raises(RateLimitError):
        await Quota(one, KEY).take_request()
    assert caplog.text.count("not shared for now") == 1
    asked = store.asked
    store.away, clock.now = False, 5.0
    await Quota(one, KEY).take_request()  # five more are there after five seconds
    assert store.asked == asked + 1


async def test_a_single_ingress_asks_nobody(clock):
    store = Store(clock)
    await Quota(RateLimiter(clock, store, 1), KEY).take_request()
    assert store.asked == 0


async def test_tokens_are_reserved_and_settled(clock):
    limiter = RateLimiter(clock)
    quota = Quota(limiter, KEY)
    await quota.reserve(500)
    assert dict(quota.headers())["x-ratelimit-remaining-tokens"] == "100"
    with pytest.raises(RateLimitError, match="limit 600, left 100, requested 200; try again in 10s") as caught:
        await Quota(limiter, KEY).reserve(200)
    assert caught.value.retry_after == pytest.approx(10.0)
    await quota.settle(50)
    await quota.settle(50)  # once only: 50 more
    later = Quota(limiter, KEY)
    await later.reserve(100)
    assert dict(later.headers()) == {
        "x-ratelimit-limit-tokens": "600",
        "x-ratelimit-remaining-tokens": "400",
        "x-ratelimit-reset-tokens": "20s",
    }


async def test_keys_of_a_tenant_share_its_limit(clock):
    limiter = RateLimiter(clock)
    keys = [Principal(name=name, tenant="t", requests_per_minute=8, tenant_requests_per_minute=10) for name in "ab"]
    for _ in range(8):
        await Quota(limiter, keys[0]).take_request()
    with pytest.raises(RateLimitError, match="for this key on requests"):
        await Quota(limiter, keys[0]).take_request()
    for _ in range(2):
        await Quota(limiter, keys[1]).take_request()
    with pytest.raises(RateLimitError, match="for this tenant on requests") as caught:
        await Quota(limiter, keys[1]).take_request()
    assert caught.value.retry_after == pytest.approx(6.0)
    assert limiter.refused == {"requests": 2, "tokens": 0}


def test_who_is_limited():
    assert not is_limited(Principal(tenant="t", name="n"))
    assert is_limited(KEY)
    assert is_limited(Principal(tenant_tokens_per_minute=1))


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0s"),
        (-1, "0s"),
        (0.0171, "18ms"),
        (0.12, "120ms"),
        (1, "1s"),
        (8.64, "8.64s"),
        (60, "1m0s"),
        (360, "6m0s"),
        (432.5, "7m12.5s"),
        (3600, "1h0m0s"),
        (math.nextafter(60, 0), "1m0s"),
    ],
)
def test_durations_are_written_as_openai_writes_them(seconds, text):
    assert duration(seconds) == text
