"""An engine changes its weights: nothing cached by others is ever read, whatever runs, waits or comes meanwhile."""

import random
import threading
import time

import pytest
from engine_harness import NAMESPACE, Harness, ScriptedExecutor, Sequence, next_token, prefixes

from warmroot.actors.engine.config import EngineConfig
from warmroot.actors.engine.draft_tree import Draft
from warmroot.actors.engine.engine import Engine
from warmroot.actors.engine.plan import NewSequence, SequenceStep, StepPlan
from warmroot.actors.local_engine import LocalEngine
from warmroot.cluster.errors import EngineError
from warmroot.cluster.ids import RequestId
from warmroot.cluster.kv_layout import KvLayout
from warmroot.cluster.messages import FinishReason, GenerateRequest
from warmroot.cluster.sampling_params import SamplingParams
from warmroot.kv_store.hashing import namespace_root

VOCAB = 7
PROMPT = list(range(1, 14))


def namespace(version: str):
    return namespace_root("scripted", version)


class WeightedExecutor(ScriptedExecutor):
    """Its tokens depend on the weights, and it knows which weights wrote each slot."""

    def __init__(self, *args, **options) -> None:
        super().__init__(*args, **options)
        self.version = "0"
        self.written_by: dict[tuple[int, int], str] = {}
        self.born: dict[RequestId, str] = {}

    def submit(self, plan: StepPlan) -> None:
        if plan.adopts:
            assert not plan.sequences
            self.version = plan.adopts
        super().submit(plan)

    def _start(self, new: NewSequence) -> None:
        super()._start(new)
        self.born[new.request_id] = self.version

    def _copy(self, plan: StepPlan) -> None:
        super()._copy(plan)
        for source, destination in plan.copies:
            for slot in range(self.layout.block_size):
                self.written_by[destination, slot] = self.written_by.get((source, slot), "")

    def _write(self, step: SequenceStep, written: set[tuple[int, int]]) -> None:
        before = set(written)
        super()._write(step, written)
        self.written_by |= dict.fromkeys(written - before, self.version)

    def _read(self, step: SequenceStep) -> None:
        super()._read(step)
        if self.born[step.request_id] == self.version:
            sequence, size = self.sequences[step.request_id], self.layout.block_size
            for position in range(step.num_computed + step.num_tokens):
                slot = sequence.tables[0][position // size], position % size
                assert self.written_by[slot] == self.version, f"{step.request_id} reads what other weights wrote"

    def _verify(self, sequence: Sequence, draft: Draft) -> list[int]:
        token_id = token_of(sequence.prefixes[-1], self.version)
        sequence.append(token_id)
        sequence.num_computed = len(sequence.tokens) - 1
        return [token_id]


def token_of(prefix: int, version: str) -> int:
    return (next_token(prefix, VOCAB) + int(version)) % VOCAB


def output_with(version: str, prompt: list[int], num_tokens: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(num_tokens):
        tokens.append(token_of(prefixes(tokens)[-1], version))
    return tokens[len(prompt) :]


class Weighted(Harness):
    def __init__(self, **options) -> None:
        super().__init__(vocab_size=VOCAB, **options)
        old = self.executor
        self.executor = WeightedExecutor(old.layout, old.num_blocks, VOCAB, None, old.max_in_flight, old.chains)
        self.engine = Engine(self.executor, self.engine.config, self.clock, namespace("0"), weights_version="0")

    def adopt(self, version: str) -> None:
        self.engine.adopt(version, namespace(version))
        self.cleared = True

    def versions(self, request_id: str) -> list[str]:
        return [delta.weights_version for delta in self.deltas[request_id] if delta.weights_version is not None]


def test_what_comes_after_a_change_finds_nothing_and_says_so():
    h = Weighted()
    h.add("a", PROMPT, max_tokens=3)
    h.run()
    h.add("b", PROMPT, max_tokens=3)
    h.run()
    assert h.deltas["b"][0].cached_tokens == 12
    h.adopt("1")
    h.add("c", PROMPT, max_tokens=3)
    h.run()
    h.check()
    assert h.deltas["c"][0].cached_tokens == 0
    assert h.output("b") == output_with("0", PROMPT, 3)
    assert h.output("c") == output_with("1", PROMPT, 3)
    assert (h.versions("a"), h.versions("b"), h.versions("c")) == (["0"], ["0"], ["1"])
    h.add("d", PROMPT, max_tokens=3)
    h.run()
    assert h.deltas["d"][0].cached_tokens == 12


def test_in_place_a_running_request_goes_on_marked_and_leaves_nothing_in_the_cache():
    h = Weighted()
    h.add("a", PROMPT, max_tokens=20)
    for _ in range(5):
        h.step()
    h.adopt("1")
    h.run()
    before = output_with("0", PROMPT, 5)
    assert h.output("a") == before + output_with("1", PROMPT + before, 15)
    assert h.versions("a") == ["0", "1"]
    assert not list(h.engine.cache.tree.nodes())
    h.add("b", PROMPT + h.output("a"), max_tokens=2)
    h.run()
    assert h.deltas["b"][0].cached_tokens == 0
    h.check()


def test_a_request_that_waits_starts_under_the_new_namespace():
    h = Weighted(max_num_seqs=1)
    h.add("a", PROMPT, max_tokens=4)
    h.step()
    h.add("b", PROMPT, max_tokens=4, salt="tenant")
    h.adopt("1")
    h.run()
    assert h.output("b") == output_with("1", PROMPT, 4)
    h.add("c", PROMPT, max_tokens=4, salt="tenant")
    h.run()
    assert h.deltas["c"][0].cached_tokens == 12
    h.check()


def test_held_requests_wait_and_what_has_begun_runs_to_its_end():
    h = Weighted(num_blocks=12, max_num_seqs=4)
    h.add("a", PROMPT, max_tokens=20)
    h.add("b", PROMPT[:5], max_tokens=20)
    for _ in range(3):
        h.step()
    h.engine.hold(True)
    h.add("c", PROMPT, max_tokens=2)
    while h.engine.num_begun:
        h.step()
    assert h.output("a") == output_with("0", PROMPT, 20)
    assert h.output("b") == output_with("0", PROMPT[:5], 20)
    assert "c" not in h.deltas
    h.adopt("1")
    h.engine.hold(False)
    h.run()
    assert h.output("c") == output_with("1", PROMPT, 2)
    h.check()


def test_what_has_begun_can_be_aborted():
    h = Weighted(max_num_seqs=1)
    h.add("a", PROMPT, max_tokens=20)
    h.step()
    h.add("b", PROMPT, max_tokens=2)
    h.engine.abort_begun()
    h.adopt("1")
    h.run()
    assert h.finish("a") is FinishReason.ABORT
    assert h.output("a") == output_with("0", PROMPT, 1)
    assert h.output("b") == output_with("1", PROMPT, 2)
    h.check()


@pytest.mark.parametrize("seed", range(12))
def test_any_mix_of_changes_requests_and_steps(seed: int):
    rng = random.Random(seed)
    h = Weighted(
        num_blocks=rng.choice([24, 64]),
        max_in_flight=rng.choice([1, 3]),
        chains=rng.random() < 0.5,
        max_num_batched_tokens=rng.choice([8, 32]),
    )
    version, added = 0, 0
    for _ in range(120):
        match rng.randrange(8):
            case 0:
                version += 1
                h.adopt(str(version))
            case 1 | 2:
                length = rng.randrange(1, 30)
                h.add(f"r{added}", [1 + n % 5 for n in range(length)], max_tokens=rng.randrange(1, 12))
                added += 1
            case 3 if added:
                h.engine.abort(RequestId(f"r{rng.randrange(added)}"))
            case _:
                h.step()
    h.run()
    h.check()
    assert h.engine.weights_version == str(version)


class Slow(WeightedExecutor):
    def result(self):
        time.sleep(0.001)
        return super().result()


@pytest.fixture
def local():
    executor = Slow(KvLayout.of((None,), 4), 4000, VOCAB)
    engine = Engine(executor, EngineConfig(max_model_len=8000), time.monotonic, namespace("0"), weights_version="0")
    said: list = []
    news = threading.Event()

    def hear(deltas) -> None:
        said.extend(deltas)
        news.set()

    engine = LocalEngine(engine, executor, hear)
    engine.said = said  # type: ignore[attr-defined]
    engine.news = news  # type: ignore[attr-defined]
    yield engine
    engine.close()


def request(name: str, max_tokens: int) -> GenerateRequest:
    return GenerateRequest(
        request_id=RequestId(name), prompt_token_ids=PROMPT, params=SamplingParams(max_tokens=max_tokens)
    )


def of(local, name: str) -> list:
    return [delta for delta in local.said if delta.request_id == name]


def test_waiting_changes_when_the_last_one_is_through(local):
    local.add(request("a", 50))
    assert local.news.wait(10)
    done = local.change_weights("1", namespace("1"), "wait")
    local.add(request("b", 2))
    with pytest.raises(EngineError, match="still under way"):
        local.change_weights("2", namespace("2"), "wait")
    done.result(10)
    assert [delta.weights_version for delta in of(local, "a") if delta.weights_version] == ["0"]
    assert of(local, "a")[-1].finish_reason is FinishReason.LENGTH
    while not (of(local, "b") and of(local, "b")[-1].finish_reason is not None):
        time.sleep(0.001)
    assert [token for delta in of(local, "b") for token in delta.token_ids] == output_with("1", PROMPT, 2)


def test_a_change_that_waits_can_be_withdrawn(local):
    local.add(request("a", 7000))
    assert local.news.wait(10)
    done = local.change_weights("1", namespace("1"), "wait")
    local.add(request("b", 2))
    assert local.withdraw()
    assert not local.withdraw()
    while not (of(local, "b") and of(local, "b")[-1].finish_reason is not None):
        time.sleep(0.001)
    assert of(local, "b")[0].weights_version == "0"
    assert not done.done()
    local.change_weights("1", namespace("1"), "in_place").result(10)
    assert not local.withdraw()


def test_an_idle_engine_changes_at_once_and_a_failed_one_says_so(local):
    local.change_weights("1", namespace("1"), "abort").result(10)
    local.add(request("a", 7000))
    assert local.news.wait(10)
    done = local.change_weights("2", namespace("2"), "wait")
    local.fail("gone")
    with pytest.raises(EngineError, match="gone"):
        done.result(10)


def test_the_namespace_of_a_version_is_its_own():
    assert len({namespace(version) for version in ("", "0", "1")} | {NAMESPACE}) == 3
