"""A pipeline stage's KV layout, its place between others, and sequences whose tokens others sample."""

import time
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from types import SimpleNamespace

import torch

from warmroot.actors.engine.plan import NewSequence, StepPlan
from warmroot.actors.parallel.plan_receiver import PlanReceiver
from warmroot.actors.parallel.plan_sender import PlanSender
from warmroot.actors.parallel.solo import Done
from warmroot.actors.parallel.stage import PipelineStage
from warmroot.actors.runner.sequences import SequenceTable
from warmroot.cluster.kv_layout import KvLayout
from warmroot.cluster.sampling_params import SamplingParams


def test_a_stage_s_layers_keep_their_groups():
    whole = KvLayout.of((None, 8, None, 8, None, 8), 4)
    assert [group.layers for group in whole.groups] == [(0, 2, 4), (1, 3, 5)]
    first, second = whole.stage(range(2)), whole.stage(range(2, 6))
    assert [group.layers for group in first.groups] == [(0,), (1,)]
    assert [group.layers for group in second.groups] == [(0, 2), (1, 3)]
    assert (first.slots, second.slots) == (1, 2)
    assert [group.window for group in second.groups] == [None, 8]
    assert [second.place(layer) for layer in range(4)] == [(0, 0), (1, 0), (0, 1), (1, 1)]


def test_a_group_without_layers_here_is_kept():
    whole = KvLayout.of((None, None, None, 8), 4)
    assert len(whole.groups) == 4
    stage = whole.stage(range(2))
    assert [group.layers for group in stage.groups] == [(0,), (1,), (), ()]
    assert stage.slots == 1


def test_all_layers_are_the_whole():
    whole = KvLayout.of((None, 8, 8, None, 8, 8), 16)
    assert whole.stage(range(6)) == whole


class Pipe:
    """The pp group of two threads."""

    size = 2

    def __init__(self, rank: int, queue: SimpleQueue) -> None:
        self.rank = rank
        self._queue = queue

    def send(self, x: torch.Tensor, dst: int) -> Done:
        assert (self.rank, dst) == (0, 1)
        self._queue.put(x)
        return Done()

    def start_recv(self, x: torch.Tensor, src: int) -> "Arrival":
        assert (self.rank, src) == (1, 0)
        return Arrival(x, self._queue)


class Arrival:
    def __init__(self, x: torch.Tensor, queue: SimpleQueue) -> None:
        self._x = x
        self._queue = queue

    def wait(self) -> None:
        self._x.copy_(self._queue.get(timeout=20))


class Half:
    spec = SimpleNamespace(hidden_size=3)
    dtype = torch.float32
    device = torch.device("cpu")

    def forward(self, token_ids, positions, kv, metadata, hidden):
        if hidden is None:
            return token_ids[:, None].float().expand(-1, 3).contiguous()
        assert token_ids is None
        return hidden * 10 + positions[:, None]


def test_hidden_states_go_from_stage_to_stage():
    queue: SimpleQueue = SimpleQueue()
    first, second = (PipelineStage(Half(), Pipe(rank, queue)) for rank in range(2))
    with ThreadPoolExecutor(1) as later:
        for token_ids in (torch.tensor([4, 5]), torch.tensor([6])):
            positions = torch.arange(len(token_ids))
            found = later.submit(second.forward, token_ids, positions, None, ())
            assert first.forward(token_ids, positions, None, ()) is None
            expected = token_ids[:, None] * 10.0 + positions[:, None]
            assert torch.equal(found.result(20), expected.expand(-1, 3))


def test_hidden_states_are_asked_for_in_the_order_of_the_steps():
    asked: list[int] = []
    queue: SimpleQueue = SimpleQueue()
    stage = PipelineStage(Half(), Pipe(1, queue))
    stage.group.start_recv = lambda x, src: (asked.append(len(x)), Arrival(x, queue))[1]
    for num_tokens in (2, 0, 3):  # a plan without sequences brings nothing
        stage.expect(num_tokens)
    assert asked == [2, 3]
    for num_tokens in (2, 3, 1):
        queue.put(torch.full((num_tokens, 3), float(num_tokens)))
        found = stage.forward(None, torch.zeros(num_tokens), None, ())
        assert torch.equal(found, torch.full((num_tokens, 3), 10.0 * num_tokens))
    assert asked == [2, 3, 1]


def test_the_next_plan_can_be_seen_before_its_turn():
    sender = PlanSender(1, "secret")
    with ThreadPoolExecutor(1) as later:
        made = later.submit(PlanReceiver, sender.addresses, "secret", 0, connect_s=20.0)
        sender.accept(20.0)
        receiver = made.result(20.0)
    assert receiver.next_plan() is None
    for step in (1, 2):
        sender.send(StepPlan(step=step))
    assert receiver.receive(20.0).plan.step == 1
    while (following := receiver.next_plan()) is None:
        time.sleep(0.001)
    assert following.step == 2 and receiver.next_plan() is following
    assert receiver.receive(20.0).plan is following
    sender.close()
    assert receiver.receive(20.0) is None
    receiver.close()


def test_a_table_learns_tokens_of_known_sequences():
    table = SequenceTable(1, rows=1, columns=4)
    for name in "ab":
        table.add(
            NewSequence(
                request_id=name,
                token_ids=[1, 2, 3],
                num_prompt_tokens=3,
                params=SamplingParams(),
                seed=0,
                num_computed=0,
                block_tables=([1],),
            )
        )
    table.drop(["b"])
    table.learn([("a", [7]), ("b", [8]), ("a", [9, 10])])
    assert table.history(table["a"]).tolist() == [1, 2, 3, 7, 9, 10]
    assert table["a"].num_output == 3
