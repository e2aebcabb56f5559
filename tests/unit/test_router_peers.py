"""What routers tell each other, and what becomes of it in a choice."""

import asyncio
import time
from collections import Counter

import pytest
from bus_contract import replica_info
from manual_clock import ManualClock

from warmroot.cluster.engine_counts import EngineCounts
from warmroot.cluster.ids import ReplicaId, RequestId
from warmroot.cluster.messages import Load
from warmroot.kv_store.bus import InMemoryBus
from warmroot.kv_store.hashing import namespace_root, pack_tokens
from warmroot.kv_store.index import PrefixIndex
from warmroot.router.core import RoutingCore
from warmroot.router.peer_exchange import PeerExchange
from warmroot.router.peers import SILENT_S, PeerLoad, Peers, fingerprint
from warmroot.router.policy import RoutingRequest, make_policy
from warmroot.router.policy.base import Prefix
from warmroot.router.policy.in_flight import LINGER_S, Account, InFlight
from warmroot.router.policy.rates import Kind, ReplicaRates

ROOT = namespace_root("m")
A, B = ReplicaId("a"), ReplicaId("b")


class Router:
    """In-flight requests and peers as a routing core joins them."""

    def __init__(self, name, clock):
        self.peers = Peers(name, clock)
        self.in_flight = InFlight(clock, on_change=self.peers.note)

    def send(self, replica, tokens, seconds=2.0):
        prefix = Prefix(ROOT, 16, pack_tokens(tokens))
        reservation = self.in_flight.reserve(replica, prefix, len(tokens), len(tokens), seconds)
        self.peers.reserved(reservation)
        return reservation

    def sees(self, replica):
        return self.peers.with_theirs(replica, self.in_flight.account(replica))


@pytest.fixture
def clock():
    return ManualClock(100.0)


@pytest.fixture
def routers(clock):
    one, two = Router("one", clock), Router("two", clock)
    for talker, listener in ((one, two), (two, one)):
        listener.peers.hear(talker.peers.word(everything=True))
    return one, two


def test_what_one_sends_the_other_counts(routers, clock):
    one, two = routers
    one.send(A, range(64), 2.0)
    second = one.send(A, range(100, 132), 1.0)
    clock.now += 0.5
    two.peers.hear(one.peers.word())
    seen = two.sees(A)
    assert (seen.unfinished, seen.context_tokens, seen.sent_tokens) == (2, 96, 96)
    assert seen.sent_s == pytest.approx(2.5)  # the first has had half a second
    assert two.sees(B) == Account()
    one.in_flight.release(second)
    two.peers.hear(one.peers.word())
    assert two.sees(A).unfinished == 1


def test_a_peers_backlog_ages_until_its_next_word(routers, clock):
    one, two = routers
    one.send(A, range(64), 2.0)
    two.peers.hear(one.peers.word())
    seen = two.sees(A)
    assert (seen.head_s, seen.head_since) == (2.0, clock.now)


def test_own_and_others_add_up(routers):
    one, two = routers
    one.send(A, range(64), 2.0)
    two.send(A, range(32), 1.0)
    two.peers.hear(one.peers.word())
    seen = two.sees(A)
    assert (seen.unfinished, seen.sent_s, seen.head_s) == (2, 3.0, 1.0)


def test_a_lost_word_is_mended_by_the_next_full_one(routers):
    one, two = routers
    reservation = one.send(A, range(64))
    two.peers.hear(one.peers.word())
    one.in_flight.release(reservation)
    one.peers.word()  # nobody hears it
    assert two.sees(A).unfinished == 1
    two.peers.hear(one.peers.word(everything=True))
    assert two.sees(A) == Account()


def test_a_silent_router_counts_no_longer(routers, clock):
    one, two = routers
    one.send(A, range(64))
    two.peers.hear(one.peers.word())
    clock.now += SILENT_S + 0.1
    two.peers.expire()
    assert two.sees(A) == Account()


def test_changes_are_told_of(clock):
    changed = []
    peers = Peers("two", clock, changed.append)
    one = Router("one", clock)
    one.send(A, range(64))
    peers.hear(one.peers.word())
    assert changed == [A]
    clock.now += SILENT_S + 0.1
    peers.expire()
    assert changed == [A, A]


def test_a_prefix_that_another_router_sent_is_seen(routers, clock):
    one, two = routers
    shared = list(range(16 * 12))
    one.send(A, [*shared, *range(900, 1000)], 2.0)
    two.peers.hear(one.peers.word())
    assert two.peers.match(Prefix(ROOT, 16, pack_tokens([*shared, *range(2000, 2100)]))) == {A: 16 * 12}
    assert two.peers.match(Prefix(ROOT, 16, pack_tokens(range(5000, 5200)))) == {}
    assert two.peers.match(Prefix(namespace_root("other"), 16, pack_tokens(shared))) == {}
    assert one.peers.match(Prefix(ROOT, 16, pack_tokens(shared))) == {}  # its own it knows exactly
    clock.now += 2.0 + LINGER_S + 0.1
    two.peers.expire()
    assert two.peers.match(Prefix(ROOT, 16, pack_tokens(shared))) == {}
    assert not two.peers._prefixes


def test_lengths_of_fingerprints():
    prefix = Prefix(ROOT, 4, pack_tokens(range(4 * 40 + 3)))
    assert [blocks for blocks, _ in fingerprint(prefix)] == [1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32, 40]
    longer = Prefix(ROOT, 4, pack_tokens(range(4 * 5)))
    assert list(fingerprint(longer)) == list(fingerprint(prefix))[:5]


def test_alone_nothing_is_kept_for_nobody(clock):
    alone = Router("one", clock)
    for _ in range(10):
        alone.send(A, range(64))
    assert not alone.peers._fresh


@pytest.mark.parametrize(
    "word",
    [
        b"",
        b"\xc1",
        b"\x91" * 9000,
        b"\x95\x01\xa1x\xc3\x81\xa1a\x94\x01\x01\x01\xcb\x7f\xf8\x00\x00\x00\x00\x00\x00\x90",
    ],
)
def test_garbage_is_a_value_error(word, clock):
    with pytest.raises(ValueError, match="not a word"):
        Peers("two", clock).hear(word)


async def test_routers_hear_each_other_over_a_bus():
    bus = InMemoryBus(time.monotonic, "bus")
    routers = [Router(str(number), time.monotonic) for number in range(3)]
    exchanges = [PeerExchange(bus, router.peers, router.peers.name) for router in routers]
    for exchange in exchanges:
        exchange.start()
    try:
        await _until(lambda: all(len(router.peers._peers) == 2 for router in routers))
        await bus.share(b"junk")
        reservation = routers[0].send(A, range(64), 30.0)
        await _until(lambda: [router.sees(A).unfinished for router in routers] == [1, 1, 1])
        assert routers[1].peers.match(Prefix(ROOT, 16, pack_tokens(range(64)))) == {A: 64}
        routers[0].in_flight.release(reservation)
        await _until(lambda: [router.sees(A).unfinished for router in routers] == [0, 0, 0])
        assert [exchange.skipped for exchange in exchanges] == [1, 1, 1]
    finally:
        for exchange in exchanges:
            exchange.close()


async def _until(condition):
    for _ in range(500):
        if condition():
            return
        await asyncio.sleep(0.02)
    raise AssertionError("it never came true")


class Idle:
    """A replica that has nothing to do."""

    def __init__(self, name):
        self.info = replica_info(name)
        self.load = Load(kv_total_blocks=1000, max_num_seqs=64)
        self.counts = EngineCounts()
        self.rates = ReplicaRates(Kind(1000.0, 0.01))


def test_routers_that_get_one_request_each_do_not_herd():
    clock = ManualClock(100.0)
    replicas = [Idle(name) for name in "abcd"]
    cores = [RoutingCore(PrefixIndex(), make_policy(), clock, name=str(number)) for number in range(16)]
    for listener in cores:
        listener.sync(replicas)
        for talker in cores:
            listener.peers.hear(talker.peers.word(everything=True))
    told = Counter()
    for turn, core in enumerate(cores):
        tokens = pack_tokens(range(turn * 1000, turn * 1000 + 900))
        question = RoutingRequest(RequestId(str(turn)), 900, tokens=tokens)
        told[core.submit(question, lambda ticket: None).replica] += 1
        word = core.peers.word()
        for listener in cores:
            listener.peers.hear(word)
    assert set(told.values()) == {4}


def test_loads_add():
    assert PeerLoad(1, 2, 3, 0.5) + PeerLoad(1, 1, 1, 0.25) == PeerLoad(2, 3, 4, 0.75)
