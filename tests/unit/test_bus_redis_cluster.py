"""The contract of the event bus against a Redis Cluster of three primaries, each with a part of the slots.

Every test has a prefix of its own, so the tests' buses live on all of the nodes.
"""

import itertools
import subprocess
import time
from collections import Counter

import pytest
from bus_contract import BusContract, read_all, replica_info
from manual_clock import ManualClock
from redis_server import RedisServer, free_port, needs_redis

from warmroot.cluster.metadata_store import parse_store
from warmroot.kv_store.redis_bus import RedisEventBus

pytestmark = needs_redis
PREFIXES = itertools.count()


@pytest.fixture(scope="module")
def nodes(tmp_path_factory):
    """Three, and the first knows of all others."""
    folder = tmp_path_factory.mktemp("redis")
    options = ("cluster-enabled yes", "cluster-node-timeout 2000")
    started = [RedisServer(folder, *options, f"cluster-port {free_port()}").start() for _ in range(3)]
    try:
        addresses = [f"127.0.0.1:{node.port}" for node in started]
        create = ["redis-cli", "--cluster", "create", *addresses, "--cluster-replicas", "0", "--cluster-yes"]
        done = subprocess.run(create, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        deadline = time.monotonic() + 30
        while not all("cluster_state:ok" in node.cli("cluster", "info") for node in started):
            assert time.monotonic() < deadline, "the nodes do not agree"
            time.sleep(0.05)
        yield started
    finally:
        for node in started:
            node.kill()


@pytest.fixture
def clock():
    return ManualClock()


@pytest.fixture
async def open_bus(nodes, clock):
    buses = []

    def opened(prefix, *hosts):
        address = ",".join(f"127.0.0.1:{node.port}" for node in hosts or nodes[:1])
        buses.append(RedisEventBus(parse_store(f"redis://{address}?prefix={prefix}"), clock))
        return buses[-1]

    yield opened
    for bus in buses:
        await bus.close()


@pytest.fixture
def bus(open_bus):
    return open_bus(f"test-{next(PREFIXES)}")


@pytest.fixture
def advance(clock):
    async def seconds(amount):
        clock.now += amount

    return seconds


class TestBusOfManyNodes(BusContract):
    pass


def node_of(nodes, prefix):
    """The port of the node that has the bus of that prefix."""
    slot = int(nodes[0].cli("cluster", "keyslot", f"{{{prefix}}}:names"))
    for row in nodes[0].cli("cluster", "nodes").splitlines():
        first, _, last = row.split()[8].partition("-")
        if int(first) <= slot <= int(last or first):
            return int(row.split()[1].partition("@")[0].rpartition(":")[2])
    raise AssertionError("nobody has the slot")


async def test_buses_live_on_different_nodes_and_any_node_leads_there(nodes, open_bus):
    places = Counter()
    for number in range(12):
        prefix = f"spread-{number}"
        writer, reader = open_bus(prefix, nodes[number % 3]), open_bus(prefix, nodes[(number + 1) % 3])
        await writer.heartbeat(replica_info(), 5.0)
        await writer.publish("a", 1, [b"batch"])
        assert [data for _, data in (await read_all(reader, {}))[0]] == [b"batch"]
        assert [info.replica for info in await reader.members()] == ["a"]
        places[node_of(nodes, prefix)] += 1
    assert places.keys() == {node.port for node in nodes}


async def test_a_node_that_is_down_does_not_matter_while_another_is_up(nodes, open_bus):
    class Down:
        port = free_port()

    with pytest.raises(ConnectionError):
        await open_bus("down", Down).check()
    bus = open_bus("down", Down, nodes[2])
    await bus.check()
    await bus.heartbeat(replica_info(), 5.0)
    assert [info.replica for info in await bus.members()] == ["a"]
