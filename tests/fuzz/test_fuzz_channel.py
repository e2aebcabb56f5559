"""Channels with hostile peers: whoever does not know the token, or talks nonsense, disturbs nobody else."""

import asyncio
import socket
import threading
import time
from contextlib import suppress
from dataclasses import replace
from random import Random

import pytest
from fuzz_mutate import mutate_bytes
from fuzz_wire import INFO, LOAD, REQUEST, message_seeds
from polling import until

from warmroot.actors.parallel.link import Hello, Listener, connect, frame
from warmroot.cluster.errors import ReplicaUnavailableError
from warmroot.cluster.ids import RequestId
from warmroot.cluster.messages import FinishReason, TokenDelta
from warmroot.router import channel_server, wire
from warmroot.router.channel_client import ChannelClient
from warmroot.router.channel_server import ChannelServer

TOKEN = "secret"
NUM_TOKENS = 200


class Replica:
    """Answers each request with ``NUM_TOKENS`` tokens, a few at a time."""

    def __init__(self):
        self.info = INFO
        self.running: dict[str, int] = {}

    def load(self):
        return LOAD

    def submit(self, request):
        self.running[request.request_id] = 0

    def abort(self, request_id):
        self.running.pop(request_id, None)

    def step(self):
        deltas = []
        for name, done in list(self.running.items()):
            last = done + 1 == NUM_TOKENS
            finish = FinishReason.LENGTH if last else None
            deltas.append(TokenDelta(request_id=RequestId(name), index=done, token_ids=[done], finish_reason=finish))
            self.running[name] = done + 1
            if last:
                del self.running[name]
        return deltas


@pytest.fixture
async def served(monkeypatch):
    """(server, its replica), which steps all the time."""
    monkeypatch.setattr(channel_server, "HELLO_TIMEOUT_S", 0.3)
    replica = Replica()
    server = ChannelServer(replica, TOKEN)
    replica.info = replace(INFO, address=await server.start("127.0.0.1"))

    async def step_forever():
        while True:
            server.push(replica.step())
            await asyncio.sleep(0.001)

    stepping = asyncio.create_task(step_forever())
    yield server, replica
    stepping.cancel()
    await server.close()


def host_of(replica):
    host, _, port = replica.info.address.rpartition(":")
    return host, int(port)


async def say(replica, *parts: bytes, pause_s=0.0, reads=True) -> bytes:
    """Connect, send, and read what comes until the server cuts the connection or nothing comes any more."""
    reader, writer = await asyncio.open_connection(*host_of(replica))
    heard = b""
    try:
        for part in parts:
            writer.write(part)
            await writer.drain()
            await asyncio.sleep(pause_s)
        if reads:
            heard = await asyncio.wait_for(reader.read(2**20), 0.2)
    except (OSError, asyncio.TimeoutError):
        pass
    finally:
        writer.transport.abort()
    return heard


async def well_behaved(replica, number: int) -> list[int]:
    """A stream from its first token to its last."""
    client = ChannelClient(replica.info, TOKEN)
    client.start()
    try:
        await until(lambda: client.connected)
        stream = await client.submit(replace(REQUEST, request_id=RequestId(f"good-{number}")))
        return [token async for delta in stream for token in delta.token_ids]
    finally:
        await client.close()


def hostile_frames(seed: int) -> list[bytes]:
    """Frames of every kind in a wrong order, changed, cut, huge or of nothing."""
    rng = Random(seed)
    whole = [wire.encode(wire.Submit(REQUEST)), *(frame(mutate_bytes(rng, b"\x93\x00\xa1x\x01", 3)) for _ in range(4))]
    whole += [rng.randbytes(rng.randrange(1, 300)) for _ in range(4)]
    whole += [b"\xff\xff\xff\xff", (4096).to_bytes(4, "big") + b"\x91" * 4096, b"\x00\x00\x00\x00", b""]
    rng.shuffle(whole)
    return whole


@pytest.mark.parametrize("seed", range(3))
async def test_strangers_disturb_nobody(served, seed):
    server, replica = served
    before = len(asyncio.all_tasks())
    good = [asyncio.create_task(well_behaved(replica, number)) for number in range(3)]
    frames = hostile_frames(seed)
    await asyncio.gather(
        *(say(replica, *frames[at:]) for at in range(len(frames))),
        *(say(replica, part) for part in frames),
        *(say(replica, reads=False) for _ in range(100)),  # a storm of connections
        say(replica, *(bytes([byte]) for byte in wire.encode(wire.Hello("x" * 40))), pause_s=0.02),  # byte by byte
    )
    assert await asyncio.gather(*good) == [list(range(NUM_TOKENS))] * 3
    await until(lambda: not server._connections)
    assert not server.owners and not replica.running
    assert len(asyncio.all_tasks()) == before


@pytest.mark.parametrize("seed", range(3))
async def test_a_peer_that_knows_the_token_and_talks_nonsense(served, seed):
    """It is cut off, its requests are aborted, and the streams of others go on."""
    server, replica = served
    rng = Random(seed)
    hello = wire.encode(wire.Hello(TOKEN))
    good = [asyncio.create_task(well_behaved(replica, number)) for number in range(3)]
    messages = [wire.msgpack.packb(seed) for seed in message_seeds()]
    own = wire.encode(wire.Submit(replace(REQUEST, request_id=RequestId(f"bad-{seed}"))))
    nonsense = [frame(mutate_bytes(rng, rng.choice(messages), rng.choice((0, 1, 3)))) for _ in range(40)]
    heard = await asyncio.gather(
        *(say(replica, hello, own, *nonsense[at : at + 5]) for at in range(0, 40, 5)),
        say(replica, hello, *[wire.encode(wire.Ping())] * 500),
        say(replica, hello, hello),
        say(replica, hello, wire.encode(wire.Abort(RequestId("good-0")))),  # not its own to abort
    )
    assert any(heard), "peers that know the token are greeted"
    assert await asyncio.gather(*good) == [list(range(NUM_TOKENS))] * 3
    await until(lambda: not server._connections)
    await until(lambda: not replica.running)
    assert not server.owners


@pytest.mark.parametrize("seed", range(3))
async def test_a_hostile_replica(seed):
    """A client of a server that says anything tries again and again, fails its streams, and closes at once."""
    rng = Random(seed)
    messages = [wire.msgpack.packb(tree) for tree in message_seeds()]
    num_greeted = 0

    async def answer(reader, writer):
        nonlocal num_greeted
        num_greeted += 1
        await reader.read(100)
        if rng.random() < 0.7:
            writer.write(wire.encode(wire.HelloAck(info, LOAD)))
        for _ in range(rng.randrange(6)):
            body = mutate_bytes(rng, rng.choice(messages), rng.choice((0, 1, 2)))
            writer.write(rng.choice((frame(body), body, b"\xff\xff\xff\xff", b"")))
        if rng.random() < 0.5:
            await reader.read(1000)
        writer.transport.abort()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    info = replace(INFO, address=f"{host}:{port}")
    client = ChannelClient(info, TOKEN)
    client.start()
    lost = 0
    while num_greeted < 8:
        try:
            stream = await client.submit(replace(REQUEST, request_id=RequestId(f"r{num_greeted}")))
            async for _ in stream:
                pass
        except Exception as error:  # what a replica rejects with may be any error of the tree
            assert hasattr(error, "status"), repr(error)
            lost += isinstance(error, ReplicaUnavailableError)
        await asyncio.sleep(0.005)
    await client.close()
    server.close()
    assert lost
    await until(lambda: not any(task.get_name().startswith("channel ") for task in asyncio.all_tasks()))


def test_a_gang_forms_beside_strangers():
    """Whoever greets byte by byte, or with anything else, does not keep ranks out."""
    listener = Listener(TOKEN, "127.0.0.1")
    host, _, port = _over_tcp(listener)[0].rpartition(":")
    strangers = [socket.create_connection((host, int(port))) for _ in range(3)]
    stop = threading.Event()

    def drip():
        while not stop.wait(0.05):
            for stranger in strangers:
                with suppress(OSError):
                    stranger.send(b"\x00")

    strangers[0].sendall(b"\x00\x00\x0f\xff")  # a greeting of 4095 bytes, which never ends
    strangers[1].sendall(b"\xff" * 64)
    threads = [threading.Thread(target=drip), threading.Thread(target=lambda: _join(listener))]
    for thread in threads:
        thread.start()
    try:
        found = listener.accept(time.monotonic() + 30)
        assert found is not None and found[0] == Hello(1, "plans")
        found[1].close()
    finally:
        stop.set()
        for thread in threads:
            thread.join()
        for stranger in strangers:
            stranger.close()
        listener.close()


def _over_tcp(listener):
    return [address for address in listener.addresses if not address.startswith("@")]


def _join(listener):
    connect(_over_tcp(listener), TOKEN, Hello(1, "plans"), time.monotonic() + 30).close()
