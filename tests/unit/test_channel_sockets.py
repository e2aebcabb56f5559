import asyncio
import contextlib
from dataclasses import replace

import pytest
from polling import until

from warmroot.cluster.errors import (
    DeadlineExceededError,
    EngineError,
    InvalidRequestError,
    OverloadedError,
    ReplicaLostError,
    ReplicaUnavailableError,
)
from warmroot.cluster.ids import Epoch, ReplicaId, RequestId
from warmroot.cluster.messages import FinishReason, GenerateRequest, Load, ReplicaInfo, TokenDelta
from warmroot.cluster.sampling_params import SamplingParams
from warmroot.cluster.time_limits import TimeLimits
from warmroot.router import channel_client, channel_server, silence, wire
from warmroot.router.channel_client import ChannelClient
from warmroot.router.channel_server import ChannelServer

TOKEN = "secret"


class Service:
    """A replica that keeps what it was told; the test says what it answers."""

    def __init__(self):
        self.info = ReplicaInfo(
            replica=ReplicaId("a"),
            epoch=Epoch(1),
            model="m",
            address="",
            kv_namespace=b"n" * 16,
            block_size=16,
            kv_total_blocks=1000,
            max_num_seqs=64,
            max_num_batched_tokens=512,
            max_model_len=2048,
            prefill_tokens_per_s=1000.0,
            decode_step_s=0.01,
        )
        self.submitted, self.aborted, self.refuse, self.running = [], [], None, 0

    def load(self):
        return Load(running=self.running, kv_total_blocks=1000, max_num_seqs=64)

    def submit(self, request):
        if self.refuse is not None:
            raise self.refuse
        self.submitted.append(request)

    def abort(self, request_id):
        self.aborted.append(request_id)


def request(request_id="r"):
    return GenerateRequest(request_id=RequestId(request_id), prompt_token_ids=[1, 2], params=SamplingParams())


def delta(request_id, index=0, finish=None):
    return TokenDelta(request_id=RequestId(request_id), index=index, token_ids=[index + 100], finish_reason=finish)


@pytest.fixture
def service():
    return Service()


@pytest.fixture
async def server(service):
    server = ChannelServer(service, TOKEN)
    service.info = replace(service.info, address=await server.start("127.0.0.1"))
    yield server
    await server.close()


@pytest.fixture
async def connect(server, service):
    clients = []

    async def make(info=None, token=TOKEN, wait=True):
        client = ChannelClient(info or service.info, token)
        clients.append(client)
        client.start()
        if wait:
            await until(lambda: client.connected)
        return client

    yield make
    for client in clients:
        await client.close()


async def test_a_stream_from_submit_to_the_last_delta(server, service, connect):
    service.running = 3
    client = await connect()
    assert client.load.running == 3
    service.running = 4
    stream = await client.submit(request())
    assert client.load.running == 4
    assert service.submitted == [request()]
    service.running = 5
    server.push([delta("r", 0), delta("unknown")])
    server.push([delta("r", 1, FinishReason.LENGTH)])
    assert [d.token_ids async for d in stream] == [[100], [101]]
    assert client.load.running == 5
    stream.close()
    await asyncio.sleep(0.02)
    assert service.aborted == []
    assert server.owners == {}


async def test_a_step_is_one_message_for_each_connection(server, service, connect, monkeypatch):
    sent = []
    encode = wire.encode
    monkeypatch.setattr(wire, "encode", lambda message: (sent.append(message), encode(message))[1])
    first, second = await connect(), await connect()
    streams = [await c.submit(request(name)) for c, name in ((first, "a"), (first, "b"), (second, "c"))]
    sent.clear()
    server.push([delta(name, 0, FinishReason.STOP) for name in "abc"])
    assert [[d.request_id for d in message.deltas] for message in sent] == [["a", "b"], ["c"]]
    for stream, name in zip(streams, "abc", strict=True):
        assert [d.request_id async for d in stream] == [name]


async def test_refusals_reach_the_caller_and_bring_the_load(service, connect):
    client = await connect()
    service.running, service.refuse = 9, OverloadedError("full", retry_after=1.5)
    with pytest.raises(OverloadedError) as caught:
        await client.submit(request())
    assert (caught.value.retry_after, client.load.running) == (1.5, 9)
    service.refuse = KeyError("bug")
    with pytest.raises(EngineError, match="bug"):
        await client.submit(request())
    service.refuse = None
    await client.submit(request())


async def test_one_id_runs_once(service, connect):
    first, second = await connect(), await connect()
    await first.submit(request())
    with pytest.raises(InvalidRequestError, match="already running"):
        await second.submit(request())
    assert len(service.submitted) == 1


async def test_closing_a_stream_aborts_its_request_only(server, service, connect):
    client = await connect()
    stream, other = await client.submit(request("r")), await client.submit(request("o"))
    stream.close()
    stream.close()
    await until(lambda: service.aborted == ["r"])
    server.push([delta("r"), delta("o", 0, FinishReason.STOP)])
    assert [d.request_id async for d in other] == ["o"]


async def test_a_caller_cancelled_before_the_answer_aborts(service, connect, monkeypatch):
    client = await connect()
    task = asyncio.ensure_future(client.submit(request()))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await until(lambda: service.aborted == ["r"])


async def test_an_ingress_that_goes_away_aborts_all_its_requests(server, service, connect):
    client, other = await connect(), await connect()
    await client.submit(request("a"))
    await client.submit(request("b"))
    await other.submit(request("c"))
    await client.close()
    await until(lambda: sorted(service.aborted) == ["a", "b"])
    assert list(server.owners) == ["c"]


async def test_streams_fail_when_the_replica_goes_and_the_client_comes_back(server, service, connect):
    client = await connect()
    stream = await client.submit(request())
    server.push([delta("r")])
    await anext(stream)
    await server.close()
    with pytest.raises(ReplicaUnavailableError, match="lost the connection"):
        await anext(stream)
    await until(lambda: not client.connected)
    with pytest.raises(ReplicaUnavailableError):
        await client.submit(request())
    again = ChannelServer(service, TOKEN)
    host, port = service.info.address.split(":")
    await again.start(host, int(port))
    await until(lambda: client.connected)
    await client.submit(request("again"))
    await again.close()


async def test_nothing_is_submitted_to_a_connection_that_just_broke(server, service, connect):
    client = await connect()
    stream = await client.submit(request())
    await server.close()
    with pytest.raises(ReplicaUnavailableError):
        await anext(stream)
    # The stream failed in the very turn of the event loop in which the loss came to light.
    assert not client.connected
    with pytest.raises(ReplicaUnavailableError):
        await asyncio.wait_for(client.submit(request("next")), 20)


async def test_deltas_that_came_before_the_break_are_still_delivered(server, connect):
    client = await connect()
    stream = await client.submit(request())
    server.push([delta("r", 0), delta("r", 1)])
    await asyncio.sleep(0.05)
    await server.close()
    assert [(await anext(stream)).index for _ in range(2)] == [0, 1]
    with pytest.raises(ReplicaUnavailableError):
        await anext(stream)


async def test_a_wrong_token_gets_nothing(server, service, connect, caplog):
    client = await connect(token="guess", wait=False)
    await until(lambda: "wrong cluster token" in caplog.text)
    assert not client.connected


async def test_another_incarnation_at_the_address_is_not_taken_for_the_replica(service, connect):
    client = await connect(replace(service.info, epoch=Epoch(2)), wait=False)
    await asyncio.sleep(0.2)
    assert not client.connected


async def raw(server_info, data):
    """What the server answers to bytes, until it closes."""
    host, port = server_info.address.split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(data)
    frames = wire.FrameDecoder(wire.MAX_FRAME_BYTES)
    with contextlib.suppress(ConnectionResetError):
        frames.feed(await asyncio.wait_for(reader.read(), 20))
    writer.close()
    messages = []
    while (frame := frames.next()) is not None:
        messages.append(wire.decode(frame))
    return messages


HELLO = wire.encode(wire.Hello(TOKEN))


@pytest.mark.parametrize(
    ("data", "error"),
    [
        (wire.encode(wire.Submit(request())), "say hello first"),
        (b"GET / HTTP/1.1\r\n\r\n", "exceeds 4096"),
        (b"\x00\x00\x00\x01\xc1", "not a message"),
        (wire.encode(wire.Hello(TOKEN, 1)), "protocol version 1"),
        (HELLO + b"\xff\xff\xff\xff", "exceeds"),
        (HELLO + b"\x00\x00\x00\x02\x91\xff", "no kind"),
        (HELLO + wire.encode(wire.Pong(Load())), "takes no Pong"),
    ],
)
async def test_nonsense_closes_that_connection_with_a_named_error(server, service, connect, data, error):
    client = await connect()
    answers = await raw(service.info, data)
    assert isinstance(answers[-1], wire.Failure)
    assert error in str(answers[-1].error)
    await client.submit(request())
    assert len(service.submitted) == 1


async def test_silence_before_hello_is_not_waited_for(service, connect, monkeypatch):
    monkeypatch.setattr(channel_server, "HELLO_TIMEOUT_S", 0.05)
    assert await raw(service.info, b"") == []


async def test_a_client_notices_a_silent_replica(monkeypatch):
    monkeypatch.setattr(channel_client, "PING_S", 0.02)
    monkeypatch.setattr(silence, "LEAST_S", 0.1)
    service = Service()

    async def mute(reader, writer):
        await reader.read(1)
        writer.write(wire.encode(wire.HelloAck(service.info, Load())))
        await reader.read()
        writer.close()

    listener = await asyncio.start_server(mute, "127.0.0.1", 0)
    host, port = listener.sockets[0].getsockname()
    service.info = replace(service.info, address=f"{host}:{port}")
    changes = []
    client = ChannelClient(service.info, TOKEN, lambda: changes.append(client.connected))
    client.start()
    await until(lambda: changes[:2] == [True, False])
    await client.close()
    listener.close()


async def test_an_ingress_that_asks_nothing_any_more_is_given_up(server, service, monkeypatch):
    monkeypatch.setattr(channel_server, "PING_S", 0.02)
    monkeypatch.setattr(silence, "MOST_S", 0.1)
    again = ChannelServer(service, TOKEN)
    host, port = (await again.start("127.0.0.1")).split(":")
    _, writer = await asyncio.open_connection(host, int(port))
    writer.write(HELLO + wire.encode(wire.Submit(request())))
    await until(lambda: service.submitted)
    await until(lambda: service.aborted == ["r"])
    writer.close()
    await again.close()


@pytest.mark.parametrize(
    ("finish", "error", "reason"),
    [
        (FinishReason.ERROR, EngineError, None),
        (FinishReason.LOST, ReplicaLostError, "engine"),
        (FinishReason.HANDED_BACK, ReplicaLostError, "draining"),
    ],
)
async def test_why_a_stream_ends_early_tells_whether_another_replica_can_do_it(server, connect, finish, error, reason):
    client = await connect()
    stream = await client.submit(request())
    server.push([delta("r", 0), replace(delta("r", 1, finish), token_ids=[], error="broken")])
    assert (await anext(stream)).index == 0
    with pytest.raises(error) as caught:
        await anext(stream)
    assert getattr(caught.value, "reason", None) == reason
    assert client.draining == (finish is FinishReason.LOST)


async def test_a_draining_replica_finishes_what_it_has(server, service, connect):
    client = await connect()
    stream, other = await client.submit(request("r")), await client.submit(request("o"))
    server.drain()
    await until(lambda: client.draining)
    with pytest.raises(ReplicaUnavailableError, match="a is about to stop"):
        await client.submit(request("new"))
    server.hand_back([RequestId("o")])
    server.push([delta("r", 0, FinishReason.STOP), delta("o", 0)])
    assert [d.index async for d in stream] == [0]
    with pytest.raises(ReplicaLostError, match="about to stop"):
        await anext(other)
    assert (service.aborted, client.connected, server.owners) == (["o"], True, {})


async def test_what_was_sent_before_the_channel_is_closed_arrives(server, connect):
    client = await connect()
    stream = await client.submit(request())
    big = replace(delta("r"), token_ids=list(range(1_000_000)))
    server.push([big, delta("r", 1_000_000, FinishReason.STOP)])
    await asyncio.gather(server.close(), until(lambda: not client.connected))
    assert [len(d.token_ids) async for d in stream] == [1_000_000, 1]


@pytest.mark.parametrize(("begun", "word"), [(False, "no first token within 0.05 s"), (True, "no next token")])
async def test_a_request_may_not_take_for_ever(server, service, monkeypatch, begun, word):
    monkeypatch.setattr(channel_client, "PING_S", 0.02)
    limits = TimeLimits(queue_timeout=0.0, first_token_timeout=0.05, idle_stream_timeout=0.05)
    client = ChannelClient(service.info, TOKEN, limits=limits)
    client.start()
    await until(lambda: client.connected)
    stream = await client.submit(request())
    if begun:
        server.push([delta("r")])
        await anext(stream)
    with pytest.raises(DeadlineExceededError, match=word):
        await anext(stream)
    await until(lambda: service.aborted == ["r"])
    resumed = replace(request("r~1"), output_token_ids=[3], age=1000.0)
    await client.submit(resumed)
    assert client.connected
    await client.close()


async def test_an_ingress_that_does_not_read_is_cut_off(server, service, monkeypatch):
    monkeypatch.setattr(channel_server, "MAX_UNSENT_BYTES", 1000)
    host, port = service.info.address.split(":")
    _, writer = await asyncio.open_connection(host, int(port))
    writer.write(HELLO + wire.encode(wire.Submit(request())))
    await until(lambda: server.owners)
    big = replace(delta("r"), token_ids=list(range(50_000)))
    while server.owners:
        server.push([big])
        await asyncio.sleep(0)
    assert service.aborted == ["r"]
    writer.close()
