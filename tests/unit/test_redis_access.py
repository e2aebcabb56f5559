"""Ways to a Redis: passwords, databases, TLS, Sentinel, Cluster; and what is said when one is barred."""

import asyncio
import shutil
import subprocess
from contextlib import suppress

import pytest
from bus_contract import read_all, replica_info
from redis_server import RedisServer, free_port, needs_redis

from warmroot.cluster.errors import ConfigError
from warmroot.cluster.metadata_store import parse_store, with_password
from warmroot.kv_store.bus import FROM_NOW
from warmroot.kv_store.redis_bus import RedisEventBus

pytestmark = needs_redis


@pytest.fixture
def start(tmp_path):
    servers = []

    def started(*options, **keywords):
        servers.append(RedisServer(tmp_path, *options, **keywords).start())
        return servers[-1]

    yield started
    for server in servers:
        server.kill()


@pytest.fixture
async def open_bus():
    buses = []

    def opened(url, password=None):
        address = with_password(parse_store(url), {"WARMROOT_REDIS_PASSWORD": password or ""})
        buses.append(RedisEventBus(address))
        return buses[-1]

    yield opened
    for bus in buses:
        await bus.close()


async def check_works(bus):
    await bus.check()
    await bus.clear()
    await bus.heartbeat(replica_info(), 5.0)
    await bus.publish_snapshot("a", 1, b"s0", b"s1")
    await bus.publish("a", 1, [b"0", b"1"])
    assert [data for _, data in (await read_all(bus, {}))[0]] == [b"s0", b"s1", b"0", b"1"]
    assert await bus.members() == [replica_info()]
    await bus.hear(FROM_NOW, 0.05)
    await bus.share(b"word")
    assert (await bus.hear(0, 5.0))[0] == [b"word"]
    await bus.put_hot("r", [], 5.0)
    assert await bus.hot(3) == []
    await bus.leave("a", 1)
    assert await bus.members() == []


async def refusal(bus):
    with pytest.raises(ConfigError) as caught:
        await bus.check()
    message = str(caught.value)
    assert "s3cret" not in message + repr(caught.value) + repr(bus.address)
    assert "wrongpw" not in message
    return message


async def test_passwords_users_and_databases(start, open_bus):
    acl = "user router on >s3cret ~{warmroot}:* &{warmroot}:* +@all -@dangerous +info"
    server = start("requirepass s3cret", acl)
    at = f"127.0.0.1:{server.port}"
    await check_works(open_bus(f"redis://:s3cret@{at}/3"))
    await check_works(open_bus(f"redis://{at}", "s3cret"))
    await check_works(open_bus(f"redis://router:s3cret@{at}"))
    assert server.cli("-n", "3", "keys", "*", secret="s3cret")
    assert "refuses the password of the default user: the password is wrong" in await refusal(
        open_bus(f"redis://:wrongpw@{at}")
    )
    assert "user router: the password is wrong" in await refusal(open_bus(f"redis://router:wrongpw@{at}"))
    assert "it wants one (in the URL, or in WARMROOT_REDIS_PASSWORD)" in await refusal(open_bus(f"redis://{at}"))
    assert "has no database 99" in await refusal(open_bus(f"redis://:s3cret@{at}/99"))
    assert "no permissions" in await refusal(open_bus(f"redis://router:s3cret@{at}?prefix=other"))


async def test_nobody_there(open_bus):
    bus = open_bus(f"redis://:s3cret@127.0.0.1:{free_port()}")
    with pytest.raises(ConnectionError, match=r"Redis at redis://127\.0\.0\.1") as caught:
        await bus.check()
    assert "s3cret" not in str(caught.value)


async def test_full_memory_is_an_error_at_the_start_and_ends_no_lease_later(start, open_bus):
    server = start("maxmemory 64mb", "maxmemory-policy noeviction")
    bus = open_bus(server.url)
    await check_works(bus)
    await bus.heartbeat(replica_info(epoch=2), 5.0)
    await bus.publish_snapshot("a", 2, b"s")
    server.cli("config", "set", "maxmemory", "1")
    assert "its memory is full (maxmemory)" in await refusal(open_bus(server.url))
    with pytest.raises(ConnectionError, match="its memory is full"):
        await bus.publish("a", 2, [b"0"])
    assert not await bus.heartbeat(replica_info(epoch=2), 5.0)
    assert [info.epoch for info in await bus.members()] == [2]
    await bus.publish_snapshot("a", 2, b"t")  # its first part takes the place of more
    assert [data for _, data in (await read_all(bus, {}))[0]] == [b"t"]
    server.cli("config", "set", "maxmemory", "0")
    await bus.publish("a", 2, [b"1"])
    assert [data for _, data in (await read_all(bus, {}))[0]] == [b"t", b"1"]


async def test_a_redis_that_hangs_is_one_that_is_down(start, open_bus, monkeypatch):
    monkeypatch.setattr("warmroot.kv_store.redis_client.TIMEOUT_S", 0.3)
    server = start()
    bus = open_bus(server.url)
    await bus.heartbeat(replica_info(), 5.0)
    server.pause()
    try:
        with pytest.raises(ConnectionError, match="imeout"):
            await asyncio.wait_for(bus.heartbeat(replica_info(), 5.0), 20)
    finally:
        server.resume()
    await bus.heartbeat(replica_info(), 5.0)
    assert len(await bus.members()) == 1


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificate")
async def test_tls(start, open_bus, tmp_path):
    key, certificate = tmp_path / "key.pem", tmp_path / "cert.pem"
    request = f"req -x509 -newkey rsa:2048 -nodes -days 2 -keyout {key} -out {certificate} -subj /CN=localhost"
    names = ["-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
    subprocess.run(["openssl", *request.split(), *names], check=True, capture_output=True)
    tls_port = free_port()
    files = f"tls-cert-file {certificate}", f"tls-key-file {key}", f"tls-ca-cert-file {certificate}"
    start(f"tls-port {tls_port}", *files, "tls-auth-clients no")
    await check_works(open_bus(f"rediss://127.0.0.1:{tls_port}?ca={certificate}"))
    with pytest.raises(ConnectionError, match=r"Redis at rediss"):
        await open_bus(f"rediss://127.0.0.1:{tls_port}").check()


async def test_a_cluster_of_redis(start, open_bus):
    server = start(
        "cluster-enabled yes", f"cluster-port {free_port()}", "cluster-node-timeout 2000", "requirepass s3cret"
    )
    server.cli("cluster", "addslotsrange", "0", "16383", secret="s3cret")
    while "cluster_state:ok" not in server.cli("cluster", "info", secret="s3cret"):
        await asyncio.sleep(0.05)
    await check_works(open_bus(f"redis://:s3cret@127.0.0.1:{server.port}"))
    assert "has no database 2" in await refusal(open_bus(f"redis://:s3cret@127.0.0.1:{server.port}/2"))


async def test_sentinel_names_the_primary_and_the_next_one(start, open_bus, tmp_path):
    first = start("requirepass s3cret", "masterauth s3cret")
    second = start("requirepass s3cret", "masterauth s3cret", f"replicaof 127.0.0.1 {first.port}")
    sentinel = start(
        f"sentinel monitor mine 127.0.0.1 {first.port} 1",
        "sentinel auth-pass mine s3cret",
        "sentinel down-after-milliseconds mine 500",
        "sentinel failover-timeout mine 2000",
        arguments=("--sentinel",),
    )
    bus = open_bus(f"redis+sentinel://:s3cret@127.0.0.1:{sentinel.port}/mine")
    await check_works(bus)
    while "master_link_status:up" not in second.cli("info", "replication", secret="s3cret"):
        await asyncio.sleep(0.05)
    while "num-slaves\n1" not in sentinel.cli("sentinel", "master", "mine"):
        await asyncio.sleep(0.05)
    first.kill()
    await until_works(bus)
    assert "role:master" in second.cli("info", "replication", secret="s3cret")
    assert [info.epoch for info in await bus.members()] == [2]


async def until_works(bus):
    deadline = asyncio.get_running_loop().time() + 30
    while asyncio.get_running_loop().time() < deadline:
        with suppress(ConnectionError):
            await bus.heartbeat(replica_info(epoch=2), 5.0)
            return
        await asyncio.sleep(0.1)
    raise AssertionError("no other primary was found")
