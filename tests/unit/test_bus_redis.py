"""The contract of the event bus, and what is Redis' own, against a real redis-server."""

import importlib.util
import itertools
from pathlib import Path

import pytest
from redis_server import RedisServer, needs_redis

from warmroot.cluster.metadata_store import parse_store
from warmroot.kv_store.redis_bus import RedisEventBus

_spec = importlib.util.spec_from_file_location("bus_contract", Path(__file__).with_name("bus_contract.py"))
bus_contract = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(bus_contract)
replica_info, read_all = bus_contract.replica_info, bus_contract.read_all

pytestmark = needs_redis
PREFIXES = itertools.count()


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    server = RedisServer(tmp_path_factory.mktemp("redis")).start()
    yield server
    server.kill()


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
async def open_bus(server, clock):
    prefix, buses = f"test-{next(PREFIXES)}", []

    def opened(**options):
        buses.append(RedisEventBus(parse_store(f"{server.url}?prefix={prefix}"), clock, **options))
        return buses[-1]

    yield opened
    for bus in buses:
        await bus.close()


@pytest.fixture
def bus(open_bus):
    return open_bus()


@pytest.fixture
def advance(clock):
    async def seconds(amount):
        clock.now += amount

    return seconds


class TestRedisEventBus(bus_contract.BusContract):
    pass
