"""Plans out, results in: leader and ranks as threads of one process."""

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from warmroot.actors.engine.plan import NewSequence, SequenceResult, SequenceStep, StepPlan, StepResult
from warmroot.actors.parallel.link import Hello, Link, Listener, connect, frame
from warmroot.actors.parallel.plan_receiver import PlanReceiver
from warmroot.actors.parallel.plan_sender import PlanSender
from warmroot.actors.parallel.pulse import Pulse
from warmroot.cluster.errors import RankLostError
from warmroot.cluster.sampling_params import SamplingParams

TOKEN = "secret"
WAIT_S = 20.0


def step_of(step: int, request_id: str = "a") -> StepPlan:
    row = SequenceStep(request_id=request_id, num_computed=step, num_tokens=1, samples=True, new_blocks=([],))
    return StepPlan(step=step, sequences=(row,))


def answer_to(step: int, token_id: int, request_id: str = "a") -> StepResult:
    return StepResult(step=step, sequences=[SequenceResult(request_id=request_id, token_ids=[token_id])])


class Gang:
    """A leader and its ranks."""

    def __init__(
        self,
        num_ranks: int,
        *,
        tcp: bool = False,
        sampling_ranks: tuple[int, ...] = (0,),
        groups: list[list[int]] | None = None,
        deadline_s: float = WAIT_S,
    ) -> None:
        self.losses: list[RankLostError] = []
        self.lost = threading.Event()
        self.sender = PlanSender(
            num_ranks,
            TOKEN,
            sampling_ranks=sampling_ranks,
            groups=groups,
            deadline_s=deadline_s,
            on_lost=self._on_lost,
        )
        addresses = self.sender.addresses[-1:] if tcp else self.sender.addresses
        receivers: dict[int, PlanReceiver] = {}

        def join(rank: int) -> None:
            receivers[rank] = PlanReceiver(addresses, TOKEN, rank, connect_s=WAIT_S)

        threads = [threading.Thread(target=join, args=(rank,)) for rank in range(num_ranks)]
        for thread in threads:
            thread.start()
        self.sender.accept(WAIT_S)
        for thread in threads:
            thread.join()
        self.ranks = [receivers[rank] for rank in range(num_ranks)]

    def _on_lost(self, error: RankLostError) -> None:
        self.losses.append(error)
        self.lost.set()

    def close(self) -> None:
        self.sender.close()
        for rank in self.ranks:
            rank.close()


@pytest.fixture
def gang() -> Iterator[Callable[..., Gang]]:
    with ExitStack() as stack:

        def make(num_ranks: int, **options: object) -> Gang:
            made = Gang(num_ranks, **options)  # type: ignore[arg-type]
            stack.callback(made.close)
            return made

        yield make


@pytest.mark.parametrize("tcp", [False, True])
def test_a_plan_reaches_every_rank_and_the_sampling_rank_answers(gang, tcp):
    made = gang(3, tcp=tcp, sampling_ranks=(2,))
    made.sender.send(step_of(1))
    assert [rank.receive(WAIT_S).plan for rank in made.ranks] == [step_of(1)] * 3
    made.ranks[2].reply(answer_to(1, 7))
    assert made.sender.result() == answer_to(1, 7)


def test_sampled_tokens_ride_with_the_next_plan(gang):
    made = gang(2)
    rank, other = made.ranks
    made.sender.send(step_of(1))
    made.sender.send(step_of(2, "b"))
    rank.reply(answer_to(1, 7))
    rank.reply(StepResult(step=2, sequences=[SequenceResult(request_id="b", token_ids=[])]))
    made.sender.result()
    made.sender.send(step_of(3))
    made.sender.result()
    made.sender.send(step_of(4))
    assert [other.receive(WAIT_S).sampled for _ in range(4)] == [(), (), (("a", [7]),), ()]


def test_large_messages_cross(gang):
    made = gang(1)
    long = NewSequence(
        request_id="long",
        token_ids=list(range(2_000_000)),
        num_prompt_tokens=1,
        params=SamplingParams(),
        seed=1,
        num_computed=0,
        block_tables=([1],),
    )
    plans = [StepPlan(step=step, new=(long,)) for step in range(3)]
    sending = threading.Thread(target=lambda: [made.sender.send(plan) for plan in plans])
    sending.start()  # it blocks unless somebody reads
    assert made.ranks[0].receive(WAIT_S).plan == plans[0]
    answer = StepResult(step=0, sequences=[SequenceResult(request_id="long", token_ids=list(range(1_000_000)))])
    answering = threading.Thread(target=made.ranks[0].reply, args=(answer,))
    answering.start()  # so does this: the leader is still sending, and must not wait for ever
    sending.join(WAIT_S)
    assert made.sender.result() == answer
    answering.join(WAIT_S)
    assert [made.ranks[0].receive(WAIT_S).plan for _ in range(2)] == plans[1:]


def test_an_error_of_any_rank_is_the_step_s_error(gang):
    made = gang(2)
    made.sender.send(step_of(1))
    made.ranks[1].reply(StepResult(step=1, error="out of memory"))
    assert made.sender.result() == StepResult(step=1, error="rank 1: out of memory")


def test_the_answers_of_all_sampling_ranks_make_one_result(gang):
    made = gang(3, sampling_ranks=(1, 2))
    for step in (1, 2):
        made.sender.send(step_of(step))
        made.ranks[2].reply(answer_to(step, 20 + step, "b"))
    for step in (1, 2):
        made.ranks[1].reply(answer_to(step, 10 + step, "a"))
    for step in (1, 2):
        sequences = answer_to(step, 10 + step, "a").sequences + answer_to(step, 20 + step, "b").sequences
        assert made.sender.result() == StepResult(step=step, sequences=sequences)


def test_groups_have_plans_of_their_own_and_learn_what_they_sampled(gang):
    made = gang(4, sampling_ranks=(0, 2), groups=[[0, 1], [2, 3]])
    made.sender.send(step_of(1, "a"), step_of(1, "b"))
    made.ranks[2].reply(answer_to(1, 8, "b"))
    made.ranks[0].reply(answer_to(1, 7, "a"))
    assert made.sender.result() == StepResult(
        step=1, sequences=answer_to(1, 7, "a").sequences + answer_to(1, 8, "b").sequences
    )
    made.sender.send(step_of(2, "a"), StepPlan(step=2))
    first = [rank.receive(WAIT_S).plan for rank in made.ranks]
    assert first == [step_of(1, "a")] * 2 + [step_of(1, "b")] * 2
    second = [rank.receive(WAIT_S) for rank in made.ranks]
    assert [delivery.plan for delivery in second] == [step_of(2, "a")] * 2 + [StepPlan(step=2)] * 2
    assert [delivery.sampled for delivery in second] == [(("a", [7]),)] * 2 + [(("b", [8]),)] * 2


def test_no_plan_follows_an_orderly_close(gang):
    made = gang(2)
    made.sender.send(step_of(1))
    made.sender.close()
    for rank in made.ranks:
        assert rank.receive(WAIT_S).plan == step_of(1)
        assert rank.receive(WAIT_S) is None
    assert not made.losses
    with pytest.raises(RankLostError, match="the leader has closed the gang"):
        made.sender.send(step_of(2))


def test_a_rank_that_leaves_is_named(gang):
    made = gang(2)
    made.sender.send(step_of(1))
    made.ranks[1].close()
    with pytest.raises(RankLostError, match=r"rank 1 (has closed the connection|is gone)"):
        made.sender.result()
    assert len(made.losses) == 1
    with pytest.raises(RankLostError, match="rank 1"):
        made.sender.send(step_of(2))
    with pytest.raises(RankLostError, match="the leader"):  # the gang dies whole
        while made.ranks[0].receive(WAIT_S) is not None:
            pass


def test_a_step_that_takes_too_long_says_where_the_ranks_are(gang):
    made = gang(2, deadline_s=0.05)
    made.sender.send(step_of(1))
    with pytest.raises(RankLostError, match=r"step 1 took longer than 0.05 s: rank 0 is through with 0, rank 1 is"):
        made.sender.result()


def test_progress_is_known_without_results(gang):
    made = gang(2)
    made.sender.send(step_of(5))
    made.ranks[1].receive(WAIT_S)
    with pytest.raises(RankLostError, match="sent no plan within"):
        made.ranks[1].receive(0.01)  # asks for the next one: is through with 5
    while made.sender.progress()["rank 1"] != 5:
        time.sleep(0.01)
    assert made.sender.progress()["rank 0"] == 0


def test_bytes_of_plans_are_counted_once_per_rank(gang):
    made = gang(3)
    made.sender.send(step_of(1))
    traffic = made.sender.traffic
    assert traffic.num_calls["plan"] == 3
    assert traffic.num_bytes["plan"] % 3 == 0
    made.ranks[0].reply(answer_to(1, 7))
    made.sender.result()
    assert traffic.num_calls["result"] == 1


def test_ranks_that_do_not_come_are_named():
    sender = PlanSender(3, TOKEN)
    rank = threading.Thread(
        target=lambda: connect(sender.addresses, TOKEN, Hello(1, "plans"), time.monotonic() + WAIT_S).close()
    )
    rank.start()
    with pytest.raises(RankLostError, match=r"rank 0 and rank 1 and rank 2 did not connect within 0.3 s"):
        sender.accept(0.3)
    rank.join()
    sender.close()


def test_a_stranger_without_the_token_is_refused():
    sender = PlanSender(1, TOKEN)
    errors: list[str] = []

    def strange() -> None:
        try:
            PlanReceiver(sender.addresses[-1:], "wrong", 0, connect_s=0.1)
        except RankLostError as error:
            errors.append(error.message)

    stranger = threading.Thread(target=strange)
    stranger.start()
    with pytest.raises(RankLostError, match="rank 0 did not connect"):
        sender.accept(0.5)
    stranger.join()
    sender.close()
    assert "does not let rank 0 in" in errors[0]


def test_bytes_that_are_no_greeting_are_refused():
    listener = Listener(TOKEN, "127.0.0.1")
    host, port = listener.addresses[-1].split(":")
    for nonsense in (b"GET / HTTP/1.1\r\n\r\n", b"\0\0\0\1\xc1", b"\xff\xff\xff\xff"):
        with socket.create_connection((host, int(port))) as stranger:
            stranger.sendall(nonsense)
            assert listener.accept(time.monotonic() + 0.1) is None
    listener.close()


def test_nonsense_on_a_link_names_the_peer():
    ours, theirs = socket.socketpair()
    link = Link(ours, "rank 4", deadline_s=1.0, limit=10)
    theirs.sendall(frame(b"x" * 11))
    with pytest.raises(RankLostError, match="rank 4 sends nonsense"):
        next(link.receive())
    link.close()
    theirs.close()


def test_a_peer_that_takes_nothing_is_lost():
    ours, theirs = socket.socketpair()
    link = Link(ours, "rank 4", deadline_s=0.05)
    with pytest.raises(RankLostError, match="rank 4 takes nothing any more"):
        link.send(frame(b"x" * 10_000_000))
    link.close()
    theirs.close()


def test_a_silent_peer_is_noticed():
    lost: list[RankLostError] = []
    noticed = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listener:  # as another machine's: nothing is known of its process
        ours, theirs = socket.create_connection(listener.getsockname()), listener.accept()[0]
    pulse = Pulse({"rank 2": ours}, lambda error: (lost.append(error), noticed.set()), silence_s=0.1)
    assert noticed.wait(WAIT_S)
    assert re.fullmatch(r"rank 2 has said nothing for \d+\.\d s", lost[0].message)
    pulse.close()
    theirs.close()


def test_a_process_that_waits_for_a_processor_is_not_lost_and_a_stopped_one_is():
    name = f"\0warmroot-test-{os.getpid()}"
    program = f"import socket, time; s = socket.socket(socket.AF_UNIX); s.connect({name!r}); time.sleep({WAIT_S})"
    lost: list[RankLostError] = []
    noticed = threading.Event()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(name)
        listener.listen()
        child = subprocess.Popen([sys.executable, "-S", "-c", program])
        ours = listener.accept()[0]
    try:
        pulse = Pulse({"rank 2": ours}, lambda error: (lost.append(error), noticed.set()), silence_s=3.0)
        assert not noticed.wait(4.0)
        child.send_signal(signal.SIGSTOP)
        assert noticed.wait(10.0)  # sooner than one that could speak: after 24 s
        pulse.close()
    finally:
        child.kill()
        child.wait()


def test_a_peer_that_takes_leave_is_not_lost():
    lost: list[RankLostError] = []
    ours, theirs = socket.socketpair()
    here = Pulse({"there": ours}, lost.append, silence_s=0.2)
    there = Pulse({"here": theirs}, lost.append, silence_s=0.2)
    here.progress = 41
    while there.progress_of_peers()["here"] != 41:
        time.sleep(0.01)
    there.close()
    time.sleep(0.4)  # longer than silence would be borne
    here.close()
    assert not lost
