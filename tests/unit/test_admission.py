"""Who may wait in a router, in which order, and what those are told who may not."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from warmroot.cluster.drain_rate import DrainRate
from warmroot.cluster.errors import DeadlineExceededError, OverloadedError
from warmroot.cluster.fair_share import FairShares
from warmroot.cluster.ids import RequestId
from warmroot.router.admission import Admission, Prospect, QueueLimits
from warmroot.router.policy.base import RoutingRequest
from warmroot.router.waiting_line import Claim, WaitingLine


class Item:
    def __init__(self, request):
        self.request = request

    def __repr__(self):
        return self.request.request_id


class Rig:
    """A queue that empties at 100 tokens a second, and is allowed to take 2 seconds."""

    def __init__(self, **limits):
        self.now = 0.0
        self.line = WaitingLine(0.003)
        self.admission = Admission(self.line, QueueLimits(**{"max_wait_s": 2.0} | limits), lambda: self.now)

    def ask(self, name, tokens=50, priority=0, tenant="", share=1.0, left_s=float("inf")):
        """Line up, or raise; what was pushed out."""
        request = RoutingRequest(RequestId(name), tokens, priority=priority, tenant=tenant, share=share)
        prospect = Prospect(guess_per_s=100.0, replicas=1, prefill_s=tokens / 100, left_s=left_s)
        claim = Claim(tokens, priority, tenant, share)
        victims = self.admission.admit(request, claim, prospect, self.now)
        self.line.put(Item(request), tokens / 100, self.now, claim)
        self.admission.rate.begin(self.now)
        return [str(item) for item, _ in victims]

    def refusal(self, name, *args, **fields):
        with pytest.raises(OverloadedError) as refused:
            self.ask(name, *args, **fields)
        return refused.value.retry_after

    def serve(self, seconds):
        """As many as fit, one by one."""
        end = self.now + seconds
        for item in self.line.take(1000, lambda item: self.now + item.request.prompt_tokens / 100 <= end + 1e-9):
            self.now += item.request.prompt_tokens / 100
            self.admission.rate.drained(item.request.prompt_tokens, self.now, item.request.priority)
        self.now = end
        self.admission.left()


def test_the_queue_is_bounded_by_what_its_tokens_take_and_says_when_there_is_room():
    rig = Rig()
    for name in "abcd":
        rig.ask(name)
    assert rig.refusal("e") == pytest.approx(0.5)
    assert rig.refusal("f") == pytest.approx(0.5 + 0.25)  # half of those who are told come back, for all one knows
    rig.serve(0.5)
    rig.ask("e")


def test_a_request_larger_than_the_queue_is_taken_when_nothing_waits():
    rig = Rig()
    rig.ask("huge", tokens=5000)
    assert rig.refusal("next", tokens=5000) == pytest.approx(50.0)


def test_a_place_is_kept_for_who_was_told_to_come_back_and_not_for_who_comes_too_early():
    rig = Rig()
    for name in "abcd":
        rig.ask(name)
    assert rig.refusal("told", 100) == pytest.approx(1.0)
    rig.now = 0.2
    assert rig.refusal("told", 100) == pytest.approx(0.8)
    rig.now = 0.0
    rig.serve(1.0)
    rig.refusal("stranger", 100)  # there is room for it, and it is promised
    rig.ask("told", 100)
    assert rig.admission.promises.kept == 1


def test_who_comes_too_early_gets_in_where_anybody_does():
    rig = Rig()
    for name in "abcd":
        rig.ask(name)
    assert min(rig.refusal(f"told{n}") for n in range(30)) == pytest.approx(0.5)
    assert rig.refusal("told29") > 5
    rig.serve(1.5)
    rig.ask("told29")  # the queue is half full with it, not more
    assert rig.admission.promises.kept == 1
    assert rig.refusal("told28") > 3


def test_places_of_those_who_do_not_come_back_are_given_away():
    rig = Rig()
    for name in "abcd":
        rig.ask(name)
    waits = [rig.refusal(f"gone{n}") for n in range(30)]
    assert waits == sorted(waits) and waits[-1] > 5
    for _ in range(60):
        rig.serve(0.5)
        rig.now += 0.01
        try:
            rig.ask(f"new{rig.now}")
            rig.ask(f"other{rig.now}")
        except OverloadedError:
            pass
    assert rig.admission.promises.expired >= 29
    assert rig.refusal("last", 200) < 3


def test_the_more_urgent_push_out_the_latest_of_the_least_urgent():
    rig = Rig()
    for number, name in enumerate("abcd"):
        rig.ask(name, priority=number % 2)
    assert rig.ask("urgent", priority=-1) == ["d"]
    assert rig.ask("normal") == ["b"]
    assert rig.refusal("normal too") == pytest.approx(0.5)
    assert rig.admission.refused == {"pushed_out": 2, "full": 1}


def test_a_tenant_with_less_than_its_part_pushes_out_one_with_more():
    rig = Rig()
    for n in range(4):
        rig.ask(f"heavy{n}", tenant="heavy")
    assert rig.ask("light0", tenant="light") == ["heavy3"]
    assert rig.ask("light1", tenant="light") == ["heavy2"]
    rig.refusal("light2", tenant="light")
    rig.refusal("heavy4", tenant="heavy")


def test_what_cannot_be_done_in_time_is_not_queued():
    rig = Rig()
    rig.ask("a", 100)
    with pytest.raises(DeadlineExceededError):
        rig.ask("hopeless", 100, left_s=0.9)
    assert rig.refusal("later perhaps", 50, left_s=1.2) > 0.5
    rig.ask("just", 50, left_s=2.6)
    assert rig.admission.refused == {"deadline": 1, "full": 1}


def test_as_many_requests_as_allowed_for_each_replica():
    rig = Rig(max_wait_s=float("inf"), max_requests=2)
    rig.ask("a")
    rig.ask("b")
    rig.refusal("c")


def test_the_line_goes_by_priority_then_tenants_then_work():
    line = WaitingLine(0.003)
    for name, work, arrival, claim in (
        ("late urgent", 9.0, 5.0, Claim(10, -1)),
        ("long a", 5.0, 0.0, Claim(10, 0, "a")),
        ("short a", 1.0, 1.0, Claim(10, 0, "a")),
        ("b", 7.0, 2.0, Claim(10, 0, "b")),
        ("idle", 0.1, 4.0, Claim(10, 3)),
    ):
        line.put(name, work, arrival, claim)
    order = []
    for name in line.take(16, lambda name: True, 6.0):
        order.append(name)
        line.shares.charge(name[-1] if name[-1] in "ab" else "", 10)
    assert order == ["late urgent", "short a", "b", "long a", "idle"]
    assert not len(line) and not line.tokens()


def test_waiting_makes_urgent_and_what_is_overdue_goes_first():
    line = WaitingLine(0.003, overdue_s=10.0)
    line.put("old", 5.0, 0.0, Claim(1, 1))
    line.put("new", 1.0, 31.0, Claim(1, 0))
    assert next(line.take(16, lambda name: True, 31.0)) == "old"
    line.put("long", 5.0, 20.0, Claim(1, 0))
    assert list(line.take(16, lambda name: True, 29.0)) == ["new", "long"]
    line.put("long", 5.0, 20.0)
    line.put("short", 1.0, 30.5)
    assert list(line.take(16, lambda name: True, 30.5)) == ["long", "short"]


def test_those_whose_time_is_up_leave_the_line():
    line = WaitingLine(0.003)
    line.put("soon", 1.0, 0.0, Claim(5), expires=1.0)
    line.put("late", 1.0, 0.0, Claim(7), expires=9.0)
    line.put("gone", 1.0, 0.0, Claim(3), expires=0.5)
    line.discard("gone")
    assert line.expire(1.0) == ["soon"] and list(line) == ["late"] and line.tokens() == 7


def test_the_rate_counts_only_while_something_waits():
    rate = DrainRate()
    assert rate.per_s(70.0, 0.0) == 70.0
    rate.begin(0.0)
    for second in range(1, 6):
        rate.drained(40, second)
    rate.end(5.0)
    rate.drained(1000, 6.0)
    assert rate.per_s(70.0, 60.0) == pytest.approx(40.0)
    rate.begin(60.0)
    rate.drained(120, 61.0, priority=-1)
    assert rate.left_for(0) < 1 and rate.left_for(-1) == 1.0


@settings(max_examples=100, deadline=None)
@given(
    shares=st.lists(st.sampled_from([0.5, 1.0, 3.0]), min_size=2, max_size=5),
    jobs=st.lists(st.tuples(st.integers(1, 50), st.integers(0, 80)), min_size=30, max_size=80),
)
def test_over_a_backlog_tenants_get_their_shares_to_within_a_request(shares, jobs):
    fair, waiting = FairShares(), {}
    for tenant, share in enumerate(shares):
        waiting[str(tenant)] = list(jobs)
        for _ in jobs:
            fair.enter(str(tenant), share)
    weight = {str(tenant): share for tenant, share in enumerate(shares)}
    served = dict.fromkeys(waiting, 0)
    largest = max(prompt + output for prompt, output in jobs)
    while all(waiting.values()):
        tenant = min(waiting, key=fair.served)
        prompt, output = waiting[tenant].pop()
        fair.charge(tenant, prompt)
        for _ in range(output):
            fair.charge(tenant, 1)
        served[tenant] += prompt + output
        for a in waiting:
            for b in waiting:
                gap = abs(served[a] / weight[a] - served[b] / weight[b])
                assert gap <= largest / min(weight[a], weight[b]) + 1e-6


def test_who_was_away_gets_no_credit_and_keeps_its_debts():
    fair = FairShares()
    fair.enter("a", 1.0)
    fair.charge("a", 1000)
    fair.enter("b", 1.0)
    assert fair.served("a") == fair.served("b") == 0  # nobody was kept waiting before
    fair.charge("a", 10)
    fair.charge("b", 30)
    fair.leave("b")
    fair.enter("c", 1.0)
    assert fair.served("c") == 10
    fair.enter("b", 1.0)
    assert fair.served("b") == 30 and min(["a", "b", "c"], key=fair.served) == "a"
    assert fair.part("d", 1.0) == 0.25 and fair.part("a", 1.0) == pytest.approx(1 / 3)
