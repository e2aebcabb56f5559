"""How ``warmroot bench parallel`` reads what the ranks of a gang say."""

import pytest
from layout_models import SMOLLM2

from warmroot.actors.engine.plan import SequenceStep, StepPlan, StepResult
from warmroot.cluster.ids import RequestId
from warmroot.cluster.parallel_layout import ParallelLayout
from warmroot.cluster.topology import Topology
from warmroot.deploy.bench.parallel import lineup
from warmroot.deploy.bench.parallel_split import GangSplit, RankSplit, byte_error, median_split
from warmroot.deploy.bench.peers.executor_clock import ExecutorClock
from warmroot.deploy.bench.peers.predicted_bytes import predicted_bytes

FIRST = {"busy_s": 0.6, "communication_s": 0.1, "bubble_s": 0.0, "control_s": 0.05, "idle_s": 0.35, "cpu_s": 0.7}
LAST = {"busy_s": 0.8, "communication_s": 0.0, "bubble_s": 0.1, "control_s": 0.05, "idle_s": 0.05, "cpu_s": 0.8}
WINDOW = {"num_steps": 100, "wall_s": 1.0, "engine_s": 0.02, "ranks": [FIRST, LAST]}


def test_a_ranks_time_falls_into_parts():
    rank = RankSplit.of(FIRST, 100)
    assert rank == RankSplit(
        compute_ms=pytest.approx(5.0),
        communication_ms=pytest.approx(1.0),
        bubble_ms=0.0,
        control_ms=pytest.approx(0.5),
        idle_ms=pytest.approx(3.5),
        cpu_ms=pytest.approx(7.0),
    )
    assert rank.work_ms == pytest.approx(6.0)


def test_stages_of_a_pipeline():
    split = GangSplit.of(WINDOW, [0, 1])
    assert split.step_ms == pytest.approx(10.0)
    assert split.busy_shares == pytest.approx([0.6, 0.8])
    assert split.bubble_share == pytest.approx((0.35 + 0.15) / 2)


def test_what_is_neither_the_engines_nor_a_stages_is_control():
    """Ranks of one stage work at the same time, stages one after the other."""
    assert GangSplit.of(WINDOW, [0, 0]).control_share == pytest.approx(1 - 0.8 - 0.02)
    alone = {**WINDOW, "wall_s": 2.0}
    assert GangSplit.of(alone, [0, 1]).control_share == pytest.approx(1 - (0.6 + 0.8 + 0.02) / 2)


def test_medians_of_every_figure():
    slow = {**WINDOW, "wall_s": 3.0, "ranks": [{**FIRST, "idle_s": 2.35}, LAST]}
    split = median_split([GangSplit.of(window, [0, 1]) for window in (WINDOW, slow, WINDOW)])
    assert split == GangSplit.of(WINDOW, [0, 1])


def test_bytes_that_were_not_foreseen_and_those_that_did_not_come():
    rank = {"counted": {"hop": 90, "plan": 7}, "predicted": {"hop": 100}}
    silent = {"counted": {}, "predicted": {"hop": 50}}
    assert byte_error([rank], ["hop"]) == pytest.approx(0.1)
    assert byte_error([rank, silent], ["hop"]) == 1.0
    assert byte_error([rank], ["all_reduce"]) == 0.0
    assert byte_error([], ["hop"]) == 0.0


def test_bytes_of_several_plans_add_up():
    layout = ParallelLayout.of(SMOLLM2, Topology(tp=2))
    first, second = predicted_bytes(layout, [[(10, 1)], [(3, 3)]], 4)
    assert first == {"all_reduce": 13 * 576 * 4 * (1 + 2 * 30)}
    assert second == {**first, "all_gather": 4 * 49152 // 2 * 4}
    assert predicted_bytes(ParallelLayout.of(SMOLLM2, Topology(pp=2)), [[(10, 1)]], 4) == [{"hop": 10 * 576 * 4}, {}]


def test_one_process_and_one_rank_come_first():
    entries = lineup(["tp", "pp"])
    assert [(entry.name, entry.num_ranks, entry.stages) for entry in entries] == [
        ("in process", 1, []),
        ("1 rank", 1, [0]),
        ("tp 2", 2, [0, 0]),
        ("pp 2", 2, [0, 1]),
    ]


def test_the_watched_executor_notes_plans():
    class Recorder:
        chains, max_in_flight, num_blocks, layout = False, 3, 7, None

        def submit(self, plan):
            self.plan = plan

        def result(self):
            return StepResult(step=self.plan.step)

    clock = ExecutorClock(Recorder())
    steps = [
        SequenceStep(request_id=RequestId(name), num_computed=0, num_tokens=size, samples=samples, new_blocks=())
        for name, size, samples in (("a", 5, True), ("b", 9, False))
    ]
    clock.submit(StepPlan(step=4, sequences=tuple(steps)))
    assert clock.result().step == 4
    assert clock.plans == [[(14, 1)]]
    assert (clock.max_in_flight, clock.num_blocks, clock.num_groups, clock.chains) == (3, 7, 1, False)
    assert clock.seconds > 0
