"""A model on its own thread: it computes while the engine schedules and delivers, and says the same."""

import random
import threading
import time
from collections import deque

from engine_harness import NAMESPACE, ScriptedExecutor, expected_output

from warmroot.actors.engine.config import EngineConfig
from warmroot.actors.engine.engine import Engine
from warmroot.actors.engine.plan import StepPlan, StepResult
from warmroot.actors.local_engine import LocalEngine
from warmroot.actors.runner.threaded import ThreadedExecutor
from warmroot.cluster.ids import RequestId
from warmroot.cluster.kv_layout import KvLayout
from warmroot.cluster.messages import FinishReason, GenerateRequest, TokenDelta
from warmroot.cluster.sampling_params import SamplingParams

VOCAB = 50


class LazyExecutor(ScriptedExecutor):
    """Computes when the result is asked for, as a runner does."""

    def __init__(self) -> None:
        super().__init__(KvLayout.of((None, 6), 4), 60, VOCAB, chains=True)
        self.waiting: deque[StepPlan] = deque()
        self.threads: set[str] = set()
        self.computed = threading.Event()
        self.closed = False

    def submit(self, plan: StepPlan) -> None:
        self.waiting.append(plan)

    def result(self) -> StepResult:
        self.threads.add(threading.current_thread().name)
        super().submit(self.waiting.popleft())
        self.computed.set()
        return super().result()

    def shutdown(self) -> None:
        self.closed = True


class Served:
    """An engine on a threaded executor and what it has delivered."""

    def __init__(self, on_deltas=lambda deltas: None, **options) -> None:
        self.inner = LazyExecutor()
        executor = ThreadedExecutor(self.inner)
        config = EngineConfig(**{"max_model_len": 100, "max_num_seqs": 8, "max_num_batched_tokens": 24} | options)
        self.deltas: dict[str, list[TokenDelta]] = {}
        self.on_deltas = on_deltas
        self.news = threading.Condition()
        self.engine = LocalEngine(Engine(executor, config, time.monotonic, NAMESPACE), executor, self.deliver)

    def deliver(self, deltas: list[TokenDelta]) -> None:
        self.on_deltas(deltas)
        with self.news:
            for delta in deltas:
                self.deltas.setdefault(delta.request_id, []).append(delta)
            self.news.notify_all()

    def add(self, name: str, prompt: list[int], **params) -> None:
        source = GenerateRequest(
            request_id=RequestId(name), prompt_token_ids=prompt, params=SamplingParams(temperature=0.0, **params)
        )
        self.engine.add(source)

    def until_ended(self, *names: str) -> None:
        with self.news:
            assert self.news.wait_for(
                lambda: all(n in self.deltas and self.deltas[n][-1].finish_reason is not None for n in names), 20
            )

    def output(self, name: str) -> list[int]:
        return [token for delta in self.deltas[name] for token in delta.token_ids]


def test_outputs_are_the_same_and_one_thread_computes():
    """On pages that are too few: with preemption, copies, cached prefixes, and ends that nobody could foresee."""
    served, generator = Served(), random.Random(0)
    prompts = {f"r{n}": [generator.randrange(2) for _ in range(generator.randrange(1, 30))] for n in range(40)}
    expected = {}
    for name, prompt in prompts.items():
        full = expected_output(prompt, 25, VOCAB)
        stop = full[generator.randrange(25)] if generator.random() < 0.7 else None
        expected[name] = full if stop is None else full[: full.index(stop) + 1]
        served.add(name, prompt, max_tokens=25, stop_token_ids=() if stop is None else (stop,))
    served.until_ended(*prompts)
    served.engine.close()
    assert {name: served.output(name) for name in prompts} == expected
    assert served.inner.threads == {"warmroot-model"} and served.inner.closed


def test_the_next_step_is_computed_while_deltas_are_delivered():
    overlapped = []

    def on_deltas(deltas: list[TokenDelta]) -> None:
        if deltas[-1].index == 0:
            served.inner.computed.clear()
            overlapped.append(served.inner.computed.wait(20) or len(served.inner.plans) > 1)

    served = Served(on_deltas)
    served.add("a", [1, 2, 3], max_tokens=5)
    served.until_ended("a")
    served.engine.close()
    assert overlapped == [True]


def test_nothing_comes_after_an_abort():
    served = Served()
    for n in range(50):
        name = f"r{n}"
        served.add(name, [n, 1, 2], max_tokens=90)
        with served.news:
            assert served.news.wait_for(lambda name=name: name in served.deltas, 20)
        served.engine.abort(RequestId(name))
        seen = len(served.deltas[name])
        served.add(f"{name}-next", [n, 3], max_tokens=3)
        served.until_ended(f"{name}-next")
        assert len(served.deltas[name]) == seen
    served.engine.close()


def test_close_ends_what_is_in_flight():
    served = Served()
    served.add("a", [1, 2, 3], max_tokens=90)
    with served.news:
        assert served.news.wait_for(lambda: "a" in served.deltas, 20)
    served.engine.close()
    assert served.inner.closed
    assert served.deltas["a"][-1].finish_reason in (FinishReason.LOST, FinishReason.LENGTH)
