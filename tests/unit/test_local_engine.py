"""The engine's thread and the generator over it, on a scripted executor."""

import asyncio
import threading
import time
from contextlib import aclosing, suppress

import pytest
from engine_harness import NAMESPACE, ScriptedExecutor, expected_output

from warmroot.actors.engine.config import EngineConfig
from warmroot.actors.engine.engine import Engine
from warmroot.actors.local_engine import LocalEngine, LocalGenerator
from warmroot.cluster.errors import EngineError, InvalidRequestError, OverloadedError
from warmroot.cluster.ids import RequestId
from warmroot.cluster.kv_layout import KvLayout
from warmroot.cluster.messages import FinishReason, GenerateRequest
from warmroot.cluster.sampling_params import SamplingParams

VOCAB = 50
PROMPT = list(range(1, 11))
FOREVER = 10_000


class GatedExecutor(ScriptedExecutor):
    """Computes a step when the test lets it."""

    def __init__(self, *args, **options) -> None:
        super().__init__(*args, **options)
        self.computing = threading.Event()
        self.gate = threading.Event()
        self.gate.set()
        self.is_shut_down = False

    def result(self):
        self.computing.set()
        assert self.gate.wait(10)
        time.sleep(0.0005)  # as a model that computes: the event loop's thread runs meanwhile
        return super().result()

    def shutdown(self) -> None:
        self.is_shut_down = True


@pytest.fixture
def executor():
    return GatedExecutor(KvLayout.of((None,), 4), num_blocks=5000, vocab_size=VOCAB)


@pytest.fixture
def start(executor):
    """Starts engines and closes them."""
    engines: list[LocalEngine] = []

    def start(on_deltas, on_events=lambda events: None, **options) -> LocalEngine:
        config = EngineConfig(max_model_len=16_000, **{"max_num_queued_reqs": 8} | options)
        engine = Engine(executor, config, time.monotonic, NAMESPACE)
        engines.append(LocalEngine(engine, executor, on_deltas, on_events))
        return engines[-1]

    yield start
    executor.gate.set()
    for engine in engines:
        engine.close()


def request(name: str, max_tokens: int = 5, prompt=PROMPT) -> GenerateRequest:
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens)
    return GenerateRequest(request_id=RequestId(name), prompt_token_ids=list(prompt), params=params)


async def collect(generator: LocalGenerator, source: GenerateRequest) -> list[int]:
    return [token async for delta in generator.generate(source) for token in delta.token_ids]


async def until(condition) -> None:
    while not condition():
        await asyncio.sleep(0.001)


async def test_many_streams_at_once(start):
    generator = LocalGenerator(start, asyncio.get_running_loop())
    prompts = [[n, *PROMPT] for n in range(8)]
    outputs = await asyncio.gather(*(collect(generator, request(str(n), 6, p)) for n, p in enumerate(prompts)))
    assert outputs == [expected_output(prompt, 6, VOCAB) for prompt in prompts]
    await until(lambda: generator.engine.load().running == 0)
    assert generator.engine.load().kv_used_blocks == 0


async def test_one_call_per_step(start, executor):
    """All deltas of a step come in one list."""
    calls, done = [], threading.Event()

    def on_deltas(deltas):
        calls.append([(delta.request_id, delta.index) for delta in deltas])
        if deltas[0].finish_reason is not None:
            done.set()

    executor.gate.clear()
    engine = start(on_deltas)
    engine.add(request("a"))
    await asyncio.to_thread(executor.computing.wait, 10)
    engine.add(request("b", 4))  # while a step is computed, without waiting for it
    executor.gate.set()
    await asyncio.to_thread(done.wait, 10)
    assert calls == [[("a", 0)], *[[("a", n), ("b", n - 1)] for n in range(1, 5)]]


async def test_sleeps_without_work(start, monkeypatch):
    rounds = []
    monkeypatch.setattr(Engine, "drain_events", lambda engine: rounds.append(1) or engine.cache.drain_events())
    generator = LocalGenerator(start, asyncio.get_running_loop())
    await collect(generator, request("a"))
    await asyncio.sleep(0.1)
    assert len(rounds) == 5
    assert await collect(generator, request("b")) == expected_output(PROMPT, 5, VOCAB)
    assert len(rounds) == 10


async def test_closing_a_stream_aborts_it(start):
    generator = LocalGenerator(start, asyncio.get_running_loop())
    async with aclosing(generator.generate(request("a", FOREVER))) as deltas:
        async for _ in deltas:
            break
    await until(lambda: not generator.engine.load().running)
    assert generator.engine.load().kv_used_blocks == 0
    assert await collect(generator, request("b")) == expected_output(PROMPT, 5, VOCAB)


async def test_an_id_used_again_at_once_hears_nothing_old(start):
    generator = LocalGenerator(start, asyncio.get_running_loop())
    first: list[tuple[int, list[int]]] = []
    expected: list[tuple[int, list[int]]] = []
    while len(first) < 200:
        prompt = [len(first) % VOCAB, *PROMPT]
        # An aborted request keeps its id until the step that it is in has been computed.
        with suppress(InvalidRequestError):
            async with aclosing(generator.generate(request("a", FOREVER, prompt))) as deltas:
                async for delta in deltas:
                    first.append((delta.index, delta.token_ids))
                    expected.append((0, expected_output(prompt, 1, VOCAB)))
                    break
    assert first == expected


async def test_cancelled_reader_aborts(start):
    generator = LocalGenerator(start, asyncio.get_running_loop())
    reader = asyncio.create_task(collect(generator, request("a", FOREVER)))
    await until(lambda: generator.engine.load().running)
    reader.cancel()
    await until(lambda: not generator.engine.load().running)
    assert generator.engine.load().kv_used_blocks == 0


async def test_refusals_are_raised_at_once(start, executor):
    executor.gate.clear()
    generator = LocalGenerator(lambda sink: start(sink, max_num_queued_reqs=1), asyncio.get_running_loop())
    first = asyncio.create_task(collect(generator, request("a")))
    await until(executor.computing.is_set)
    second = asyncio.create_task(collect(generator, request("b")))
    await asyncio.sleep(0)
    with pytest.raises(OverloadedError):
        await collect(generator, request("c"))
    with pytest.raises(InvalidRequestError, match="running already"):
        await collect(generator, request("a"))
    with pytest.raises(InvalidRequestError, match="at least one token"):
        await collect(generator, request("d", prompt=[]))
    executor.gate.set()
    assert await first == await second == expected_output(PROMPT, 5, VOCAB)


async def test_executor_error_ends_every_stream(start, executor):
    executor.fail_at = 3
    generator = LocalGenerator(start, asyncio.get_running_loop())
    assert generator.engine.healthy
    streams = [collect(generator, request(name, FOREVER)) for name in "ab"]
    outcomes = await asyncio.gather(*streams, return_exceptions=True)
    assert all(isinstance(e, EngineError) and e.message == "scripted failure" for e in outcomes)
    assert not generator.engine.healthy
    with pytest.raises(EngineError, match="scripted failure"):
        await collect(generator, request("c"))


async def test_crash_of_the_thread_ends_every_stream(start, executor):
    def crash(plan):
        raise RuntimeError("lost")

    generator = LocalGenerator(start, asyncio.get_running_loop())
    await collect(generator, request("a"))
    executor.submit = crash
    with pytest.raises(EngineError, match="RuntimeError: lost"):
        await collect(generator, request("b"))
    assert not generator.engine.healthy
    assert generator.engine.load().kv_used_blocks == 0


async def test_close_ends_streams_and_releases_the_executor(start, executor):
    generator = LocalGenerator(start, asyncio.get_running_loop())
    reader = asyncio.create_task(collect(generator, request("a", FOREVER)))
    await until(lambda: generator.engine.load().running)
    generator.close()
    with pytest.raises(EngineError, match="closed"):
        await reader
    assert executor.is_shut_down and not generator.engine.healthy
    with pytest.raises(EngineError, match="closed"):
        generator.engine.add(request("b"))
    with pytest.raises(EngineError, match="closed"):
        generator.engine.snapshot()
    generator.close()


async def test_snapshot_comes_after_the_events_before_it(start):
    events, done = [], threading.Event()
    engine = start(lambda deltas: deltas[-1].finish_reason is not None and done.set(), events.extend)
    engine.add(request("a"))
    await asyncio.to_thread(done.wait, 10)
    snapshot = await asyncio.wrap_future(engine.snapshot())
    stored = {block for event in events for block in event.hashes}
    assert {block for event in snapshot for block in event.hashes} == stored and len(stored) == 3


async def test_aborts_and_adds_from_many_threads(start):
    """No stream hangs and no block leaks, whatever is added and aborted meanwhile."""
    ended: dict[str, FinishReason] = {}

    def on_deltas(deltas):
        ended.update({d.request_id: d.finish_reason for d in deltas if d.finish_reason is not None})

    engine = start(on_deltas, max_num_queued_reqs=1000)

    def client(number: int) -> None:
        for n in range(40):
            name = f"{number}-{n}"
            engine.add(request(name, 3 + n % 5, [number, n, *PROMPT]))
            if n % 3 == 0:
                engine.abort(RequestId(name))

    await asyncio.gather(*(asyncio.to_thread(client, number) for number in range(6)))
    kept = {f"{number}-{n}" for number in range(6) for n in range(40) if n % 3}
    await until(lambda: kept <= ended.keys() and engine.load().running == 0)
    assert set(ended.values()) == {FinishReason.LENGTH}
    assert engine.load().kv_used_blocks == 0
