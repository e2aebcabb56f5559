"""A gang whose ranks are threads: what its executor passes on, and what it makes of losses."""

import threading
from collections import deque
from pathlib import Path

import pytest

from warmroot.actors.engine.plan import SequenceResult, SequenceStep, StepPlan, StepResult
from warmroot.actors.parallel.gang import GangExecutor, start_gang
from warmroot.actors.parallel.gang_config import GangConfig, Meeting, RankReport
from warmroot.actors.parallel.plan_receiver import PlanReceiver
from warmroot.actors.parallel.rank import RankLoop
from warmroot.actors.runner.load import KvMemoryConfig
from warmroot.cluster.errors import ModelLoadError, RankLostError
from warmroot.cluster.kv_layout import KvLayout
from warmroot.cluster.topology import Topology

WAIT_S = 20.0


class FakeRunner:
    """Samples the number of the step for every sequence; knows only what it was taught."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.learned: list[tuple] = []
        self.fails_at = 0
        self.dies_at = 0
        self._plans: deque[StepPlan] = deque()

    def learn(self, sampled) -> None:
        self.learned += sampled

    def submit(self, plan: StepPlan) -> None:
        self._plans.append(plan)

    def result(self) -> StepResult:
        plan = self._plans.popleft()
        if plan.step == self.dies_at:
            raise RankLostError("this thread stands for a process that dies")
        if plan.step == self.fails_at:
            return StepResult(step=plan.step, error="ValueError: no")
        answers = [SequenceResult(request_id=s.request_id, token_ids=[plan.step]) for s in plan.sequences]
        return StepResult(step=plan.step, sequences=answers)


class ThreadCrew:
    address = "127.0.0.1"

    def __init__(self, topology: Topology, failure: Exception | None = None) -> None:
        self.config = GangConfig(
            path=Path("model"), topology=topology, kv=KvMemoryConfig(), threads_per_rank=1, step_s=WAIT_S
        )
        self.runners = [FakeRunner(rank) for rank in range(topology.world_size)]
        self.killed = threading.Event()
        self.num_ends = 0
        self._failure = failure
        self._threads: list[threading.Thread] = []

    def serve_store(self):
        return "127.0.0.1", 1

    def join(self, meeting: Meeting, progress) -> list[RankReport]:
        if self._failure is not None:
            raise self._failure
        progress(3, 4)
        for rank, runner in enumerate(self.runners):
            self._threads.append(threading.Thread(target=self._run, args=(meeting, rank, runner)))
            self._threads[-1].start()
        return [
            RankReport(
                rank=rank,
                host="here",
                pid=100 + rank,
                peak_memory_bytes=1,
                layout=KvLayout.of((None, None), 4),
                num_blocks=9,
                kv_dtype="float32",
                weights_format="float32",
                kernels="none",
                num_threads=1,
            )
            for rank in range(len(self.runners))
        ]

    def kill(self) -> None:
        self.killed.set()

    def end(self) -> None:
        self.num_ends += 1
        for thread in self._threads:
            thread.join()

    def _run(self, meeting: Meeting, rank: int, runner: FakeRunner) -> None:
        receiver = PlanReceiver(meeting.leader, meeting.token, rank, connect_s=WAIT_S)
        try:
            topology = self.config.topology
            RankLoop(
                runner,
                receiver,
                lambda num_tokens: None,
                samples=topology.samples(rank),
            ).run()
        except RankLostError:
            pass
        finally:
            receiver.close()


@pytest.fixture
def started(request):
    crew = ThreadCrew(getattr(request, "param", Topology(tp=2, pp=2)))
    executor = start_gang(crew)
    yield crew, executor
    executor.shutdown()


def plan(step: int) -> StepPlan:
    rows = [
        SequenceStep(request_id=name, num_computed=0, num_tokens=1, samples=True, new_blocks=([],)) for name in "ab"
    ]
    return StepPlan(step=step, sequences=tuple(rows))


def tokens(executor: GangExecutor) -> list[int]:
    result = executor.result()
    assert result.error is None
    return [answer.token_ids[0] for answer in result.sequences]


def test_it_is_an_executor_of_as_many_steps_as_stages(started):
    _, executor = started
    assert (executor.max_in_flight, executor.chains) == (2, False)
    assert (executor.layout, executor.num_blocks) == (KvLayout.of((None, None), 4), 9)
    executor.submit(plan(1))
    executor.submit(plan(2))
    assert [tokens(executor), tokens(executor)] == [[1, 1], [2, 2]]


def test_ranks_that_do_not_sample_learn_what_was_sampled(started):
    crew, executor = started
    for step in (1, 2, 3):
        executor.submit(plan(step))
        tokens(executor)
    executor.shutdown()
    known = [("a", [1]), ("b", [1]), ("a", [2]), ("b", [2])]
    assert [runner.learned for runner in crew.runners] == [known, known, [], known]


@pytest.mark.parametrize("started", [Topology(tp=1, pp=2, ep=2)], indirect=True)
def test_attention_groups_run_plans_of_their_own(started):
    crew, executor = started
    assert executor.num_groups == 2
    executor.submit(plan(1))
    assert tokens(executor) == [1, 1]
    executor.submit_all([StepPlan(step=2), plan(2)])
    assert tokens(executor) == [2, 2]
    executor.submit(plan(3))
    tokens(executor)
    executor.shutdown()
    first, second = [("a", [1]), ("b", [1])], [("a", [2]), ("b", [2])]
    assert [runner.learned for runner in crew.runners] == [first, second, [], []]


def test_states_of_the_ranks(started):
    _, executor = started
    places = [(state.rank, state.stage, state.pid) for state in executor.ranks()]
    assert places == [(0, 0, 100), (1, 0, 101), (2, 1, 102), (3, 1, 103)]


def first_error(executor: GangExecutor) -> StepResult:
    """The ranks here do not wait for each other: the one that samples may be ahead of the one that fails."""
    for step in range(1, 1000):
        executor.submit(plan(step))
        result = executor.result()
        if result.error is not None:
            return result
    raise AssertionError("no error")


@pytest.mark.parametrize("rank", range(4))
def test_an_error_of_any_rank_ends_the_gang(started, rank):
    crew, executor = started
    crew.runners[rank].fails_at = 2
    assert first_error(executor).error == f"rank {rank}: ValueError: no"
    assert crew.killed.is_set()


@pytest.mark.parametrize("rank", range(4))
def test_a_lost_rank_is_the_error_of_all_later_steps(started, rank):
    crew, executor = started
    crew.runners[rank].dies_at = 2
    error = first_error(executor).error
    assert error is not None and f"rank {rank}" in error
    assert crew.killed.is_set()
    executor.submit(plan(2000))
    assert executor.result() == StepResult(step=2000, error=error)


def test_shutdown_may_be_called_twice(started):
    crew, executor = started
    executor.shutdown()
    executor.shutdown()
    assert not crew.killed.is_set()


def test_a_gang_that_cannot_start_leaves_nothing_behind():
    crew = ThreadCrew(Topology(tp=2), failure=ModelLoadError("no such file"))
    with pytest.raises(ModelLoadError, match="no such file"):
        start_gang(crew)
    assert crew.killed.is_set() and crew.num_ends == 1


def test_progress_is_passed_on():
    seen: list[tuple[int, int]] = []
    executor = start_gang(ThreadCrew(Topology()), lambda done, total: seen.append((done, total)))
    executor.shutdown()
    assert seen == [(3, 4)]
