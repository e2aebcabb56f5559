"""One engine for each attention group, all of which step together."""

import asyncio
from contextlib import aclosing

import pytest
from engine_harness import NAMESPACE, ScriptedExecutor, expected_output
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize
from joint_harness import JointHarness, ScriptedGroups
from test_engine_properties import LAYOUTS, SPECULATION, EngineMachine

from warmroot.actors.engine.config import EngineConfig
from warmroot.actors.engine.engine import Engine
from warmroot.actors.engine.joint import JointEngine, start_engines
from warmroot.actors.local_engine import LocalEngine, LocalGenerator
from warmroot.cluster.errors import EngineError, InvalidRequestError, OverloadedError
from warmroot.cluster.ids import RequestId
from warmroot.cluster.kv_layout import KvLayout
from warmroot.cluster.messages import FinishReason, GenerateRequest, Load
from warmroot.cluster.sampling_params import SamplingParams
from warmroot.kv_store.events import BlocksStored, KvEvent

PROMPT = [1, 2, 0, 1, 2, 2, 0, 1, 1, 0, 2, 1]


def test_requests_are_spread_and_step_together():
    h = JointHarness(3, vocab_size=50)
    for index in range(7):
        h.add(f"r{index}", [index, *PROMPT], max_tokens=6)
    h.run()
    h.check()
    homes = list(h.homes().values())
    assert sorted(homes.count(group) for group in range(3)) == [2, 2, 3]
    assert len({len(group.plans) for group in h.executor.groups}) == 1
    for index in range(7):
        assert h.output(f"r{index}") == expected_output([index, *PROMPT], 6, 50)


def test_a_request_alone_leaves_the_others_empty_plans():
    h = JointHarness(3, vocab_size=50)
    h.add("a", PROMPT, max_tokens=4)
    h.run()
    assert h.output("a") == expected_output(PROMPT, 4, 50)
    plans = [group.plans for group in h.executor.groups]
    assert [len(plan.sequences) for plan in plans[0]] == [1] * 4
    assert [[plan.num_tokens for plan in group] for group in plans[1:]] == [[0] * 4] * 2
    assert [[plan.step for plan in group] for group in plans] == [[1, 2, 3, 4]] * 3


def test_numbers_of_steps_part_and_stay_right():
    """A group that had nothing to do for a while counts fewer steps of its own."""
    h = JointHarness(2, vocab_size=50, max_in_flight=2)
    h.add("a", PROMPT, max_tokens=9)
    for _ in range(4):
        h.step()
    h.add("b", PROMPT[::-1], max_tokens=9)
    h.run()
    h.check()
    assert h.homes() == {"a": 0, "b": 1}
    assert h.output("a") == expected_output(PROMPT, 9, 50)
    assert h.output("b") == expected_output(PROMPT[::-1], 9, 50)


def test_a_warm_prefix_draws_until_there_is_too_much_work():
    h = JointHarness(2, max_model_len=1000, num_blocks=400, max_num_batched_tokens=256)
    long = [n % 3 for n in range(200)]
    h.add("first", long, max_tokens=1)
    h.run()
    for index in range(6):
        h.add(f"r{index}", [*long, index % 3], max_tokens=1)
    h.run()
    assert [h.homes()[f"r{index}"] for index in range(6)] == [0, 0, 0, 0, 1, 0]
    h.check()


def test_a_prefill_does_not_hold_up_the_decodes_of_another_group():
    h = JointHarness(2, max_num_batched_tokens=64, max_prefill_chunk=5)
    h.add("a", PROMPT, max_tokens=20)
    h.step()
    h.add("b", [n % 3 for n in range(40)], max_tokens=4)
    h.run()
    h.check()
    first, second = ([plan.num_tokens for plan in group.plans] for group in h.executor.groups)
    assert first == [12] + [1] * 19
    assert second == [0] + [5] * 8 + [1] * 3 + [0] * 8


def test_events_are_those_of_the_union():
    h = JointHarness(2, vocab_size=50)
    h.add("a", PROMPT, max_tokens=1)
    h.add("b", PROMPT, max_tokens=1)
    h.run()
    assert set(h.homes().values()) == {0, 1}
    stored = [event for event in h.engine.drain_events() if isinstance(event, BlocksStored)]
    assert [len(event.hashes) for event in stored] == [3]
    h.engine.engines[0].clear_cache()
    assert h.engine.drain_events() == []
    h.engine.clear_cache()
    assert h.engine.drain_events() != []
    assert h.engine.snapshot_events() == []


def test_loads_are_summed():
    h = JointHarness(2, num_blocks=21, max_num_seqs=1)
    for name in "abc":
        h.add(name, PROMPT, max_tokens=3)
    assert h.engine.load() == Load(waiting=3, waiting_tokens=36, kv_total_blocks=40, max_num_seqs=2)
    h.step()
    load = h.engine.load()
    assert (load.running, load.waiting, load.kv_used_blocks) == (2, 1, 6)


def test_refusals():
    h = JointHarness(2, max_num_seqs=1, max_num_queued_reqs=1)
    h.add("a", PROMPT)
    with pytest.raises(InvalidRequestError, match="request a is running already"):
        h.add("a", PROMPT)
    with pytest.raises(InvalidRequestError, match="no int32"):
        h.add("large", [2**40])
    with pytest.raises(InvalidRequestError, match="at least one token"):
        h.add("empty", [])
    h.add("b", PROMPT)  # the group of "a" is full
    with pytest.raises(OverloadedError, match="1 requests are waiting already"):
        h.add("c", PROMPT)


def test_an_abort_reaches_the_group():
    h = JointHarness(2, vocab_size=50)
    for name in "abcd":
        h.add(name, PROMPT, max_tokens=20)
    h.step()
    h.engine.abort("b")
    h.engine.abort("unknown")
    h.run()
    h.check()
    assert h.finish("b") is None
    assert all(h.output(name) == expected_output(PROMPT, 20, 50) for name in "acd")


def test_a_request_that_expires_before_its_step_is_owed_nothing_any_more():
    h = JointHarness(2)
    for engine in h.engine.engines:
        engine._wall = lambda: h.clock.now
    params = SamplingParams(max_tokens=1, temperature=0.0)
    h.clock.now = 5.0
    h.engine.add(GenerateRequest(request_id=RequestId("a"), prompt_token_ids=PROMPT, params=params, deadline=6.0))
    h.clock.now = 7.0
    assert [delta.finish_reason for delta in h.engine.step()] == [FinishReason.DEADLINE]
    assert h.engine._owed == [{}, {}]


def test_a_request_larger_than_the_bound_goes_where_nothing_waits():
    h = JointHarness(2, max_num_seqs=1, max_num_queued_tokens=10, num_blocks=200)
    for name in "abc":
        h.add(name, [2, 1, 0] * 3, max_tokens=60)
        h.step()
    counts = [len(engine.scheduler.waiting) for engine in h.engine.engines]
    busy = counts.index(1)
    assert sorted(counts) == [0, 1]
    assert [h.engine._cost(group, 30)[0] for group in (busy, 1 - busy)] == [True, False]


def test_a_failed_step_ends_the_requests_of_all_groups():
    h = JointHarness(2, fail_at=3)
    for name in "abc":
        h.add(name, PROMPT, max_tokens=20)
    h.run()
    assert all(h.finish(name) is FinishReason.LOST for name in "abc")
    assert {h.deltas[name][-1].error for name in "abc"} == {"scripted failure"}
    with pytest.raises(EngineError, match="scripted failure"):
        h.add("d", PROMPT)
    with pytest.raises(EngineError, match="scripted failure"):
        h.engine.step()


def test_one_group_needs_no_joint_engine():
    config = EngineConfig(max_model_len=64)
    kinds = []
    for num_groups in (1, 2):
        groups = [ScriptedExecutor(KvLayout.of((None,), 4), 9) for _ in range(num_groups)]
        kinds.append(type(start_engines(ScriptedGroups(groups), config, lambda: 0.0, NAMESPACE)))
    assert kinds == [Engine, JointEngine]


class JointMachine(EngineMachine):
    """Everything that may happen to one engine, in several groups."""

    @initialize(
        num_groups=st.integers(2, 3),
        windows=st.sampled_from(LAYOUTS),
        num_blocks=st.integers(8, 40),
        max_num_seqs=st.integers(1, 4),
        budget=st.integers(0, 24),
        chunk=st.sampled_from([None, 1, 5]),
        caching=st.sampled_from([True, True, True, False]),
        in_flight=st.integers(1, 3),
        speculation=st.sampled_from(SPECULATION),
    )
    def start(self, num_groups, windows, num_blocks, max_num_seqs, budget, chunk, caching, in_flight, speculation):
        self.harness = JointHarness(
            num_groups,
            num_blocks=num_blocks,
            windows=windows,
            max_in_flight=in_flight,
            max_model_len=60,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_seqs + budget,
            max_prefill_chunk=chunk,
            enable_prefix_caching=caching,
            speculation=speculation,
        )
        self.requests = {}
        self.aborted = set()

    def nothing_is_held(self):
        for engine in self.harness.engine.engines:
            assert engine.cache.pool.num_used == 0 and engine.load().waiting_tokens == 0
        self.harness.engine.clear_cache()
        for engine in self.harness.engine.engines:
            assert engine.cache.pool.num_free == self.harness.executor.num_blocks - 1


TestJointEngine = JointMachine.TestCase
TestJointEngine.settings = settings(
    max_examples=60, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
)


async def test_a_local_engine_runs_it():
    """Streams, an abort by a reader that leaves, the events and a snapshot of them."""
    groups = ScriptedGroups([ScriptedExecutor(KvLayout.of((None,), 4), 64, 50) for _ in range(2)])
    config = EngineConfig(max_model_len=1000)
    engine = start_engines(groups, config, lambda: 0.0, NAMESPACE)
    events: list[KvEvent] = []
    generator = LocalGenerator(
        lambda on_deltas: LocalEngine(engine, groups, on_deltas, events.extend), asyncio.get_running_loop()
    )

    async def read(name: str, most: int) -> list[int]:
        request = GenerateRequest(
            request_id=RequestId(name), prompt_token_ids=PROMPT, params=SamplingParams(max_tokens=20)
        )
        tokens: list[int] = []
        async with aclosing(generator.generate(request)) as deltas:
            async for delta in deltas:
                tokens += delta.token_ids
                if len(tokens) >= most:
                    break
        return tokens

    try:
        found = await asyncio.gather(*(read(f"r{n}", 3 if n == 2 else 20) for n in range(5)))
        expected = expected_output(PROMPT, 20, 50)
        assert [tokens[:20] for tokens in found] == [expected, expected, expected[: len(found[2])], expected, expected]
        cached = await asyncio.wrap_future(generator.engine.snapshot())
        known = {block for event in cached for block in event.hashes}
        assert known == {block for event in events if isinstance(event, BlocksStored) for block in event.hashes}
        assert generator.engine.load().running == 0
    finally:
        generator.close()
