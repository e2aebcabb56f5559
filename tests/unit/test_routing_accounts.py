"""Whatever becomes of requests, a router counts those that are under way and no others.

Other routers have sent everything to one worker of eight because some path forgot to count a request, or to stop.
"""

import asyncio
import random
from collections import Counter
from types import SimpleNamespace

import pytest
from bus_contract import replica_info
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from manual_clock import ManualClock

from warmroot.cluster.errors import EngineError, InvalidRequestError, OverloadedError, ReplicaUnavailableError
from warmroot.cluster.ids import RequestId
from warmroot.cluster.messages import FinishReason, GenerateRequest, Load, TokenDelta
from warmroot.cluster.sampling_params import SamplingParams
from warmroot.kv_store.bus import InMemoryBus
from warmroot.kv_store.hashing import pack_tokens
from warmroot.kv_store.index import PrefixIndex
from warmroot.router.core import RoutingCore
from warmroot.router.dispatch import Dispatcher
from warmroot.router.late_binding import LateBinding
from warmroot.router.membership import Membership
from warmroot.router.policy import POLICIES, RIVALS, Column, RoutingRequest, make_policy
from warmroot.router.policy.in_flight import LINGER_S, Phase
from warmroot.router.policy.rates import Kind, ReplicaRates

NAMES = "abcd"


class Watched:
    """A policy that notes what it is told of requests."""

    def __init__(self, policy):
        self._policy = policy
        self.under_way = Counter()

    def __getattr__(self, name):
        return getattr(self._policy, name)

    def routed(self, request, replica):
        self.under_way[replica] += 1
        self._policy.routed(request, replica)

    def finished(self, request, replica):
        self.under_way[replica] -= 1
        self._policy.finished(request, replica)


class CoreMachine(RuleBasedStateMachine):
    """Random histories of a routing core: replicas come, go and refuse; requests end at any moment, and again."""

    @initialize(policy=st.sampled_from(sorted({*POLICIES, *RIVALS})), late=st.booleans())
    def start(self, policy, late):
        self.clock = ManualClock(100.0)
        self.policy = Watched(make_policy(policy, random.Random(0)))
        self.core = RoutingCore(
            PrefixIndex(), self.policy, self.clock, late=LateBinding(backlog_s=0.1) if late else None, history=8
        )
        self.tickets, self.ended = [], set()
        self.join("a")

    @rule(name=st.sampled_from(NAMES))
    def join(self, name):
        """Also another incarnation of one that is there."""
        rates = ReplicaRates(Kind(1000.0, 0.01))
        self.core.join(SimpleNamespace(info=replica_info(name), load=Load(max_num_seqs=64), rates=rates))

    @rule(name=st.sampled_from(NAMES))
    def leave(self, name):
        self.core.leave(name)

    @precondition(lambda self: len(self.core.fleet))
    @rule(blocks=st.lists(st.integers(0, 2), max_size=6), salt=st.sampled_from(["", "s"]))
    def submit(self, blocks, salt):
        tokens = pack_tokens([block for block in blocks for _ in range(16)] + [9])
        name = RequestId(str(len(self.tickets)))
        request = RoutingRequest(name, 16 * len(blocks) + 1, tokens=tokens, salt=salt)
        self.tickets.append(self.core.submit(request, lambda ticket: None))

    @precondition(lambda self: self.under_way())
    @rule(data=st.data())
    def refuse(self, data):
        ticket = data.draw(st.sampled_from(self.under_way()))
        before = ticket.replica
        if ticket.reservation.phase is Phase.PREFILL:
            self.core.refused(ticket, OverloadedError("full", retry_after=1.0))
            assert ticket.replica != before

    @precondition(lambda self: self.under_way())
    @rule(data=st.data(), cached=st.sampled_from([None, 0, 16]))
    def first_token(self, data, cached):
        ticket = data.draw(st.sampled_from(self.under_way()))
        self.core.first_token(ticket, cached if cached is None else min(cached, ticket.request.prompt_tokens - 1))

    @precondition(lambda self: self.tickets)
    @rule(data=st.data(), tokens=st.sampled_from([0, 3, 40]))
    def finish(self, data, tokens):
        number = data.draw(st.integers(0, len(self.tickets) - 1))
        self.core.finish(self.tickets[number], tokens)
        self.ended.add(number)

    @rule(seconds=st.sampled_from([0.01, 0.4, 6.0]))
    def time_goes_by(self, seconds):
        self.clock.now += seconds
        self.core.pump()

    @invariant()
    def counts_what_is_under_way(self):
        if not hasattr(self, "core"):
            return
        lost = sum(1 for t in self.tickets if t.replica is None and t.tried and self.tickets.index(t) not in self.ended)
        alive = len(self.tickets) - len(self.ended)
        assert len(self.under_way()) + self.core.num_waiting + lost == alive
        for name in NAMES:
            here = [ticket.reservation for ticket in self.under_way() if ticket.replica == name]
            prefills = [one for one in here if one.phase is Phase.PREFILL]
            account = self.core.in_flight.account(name)
            assert account.unfinished == len(here) == self.policy.under_way[name]
            assert account.context_tokens == sum(one.prompt_tokens for one in here)
            assert account.sent_tokens == sum(one.uncached_tokens for one in prefills)
            assert account.sent_s == pytest.approx(sum(one.prefill_s for one in prefills))
            if name in self.core.fleet:
                column = self.core.fleet.candidates(self.clock()).table[:, self.core.fleet.place(name)]
                assert column[Column.UNFINISHED] == len(here)
                assert column[Column.SENT_TOKENS] == account.sent_tokens

    def under_way(self):
        return [ticket for ticket in self.tickets if ticket.reservation is not None]

    def teardown(self):
        if not hasattr(self, "core"):
            return
        for ticket in self.tickets:
            self.core.finish(ticket)
        self.ended = set(range(len(self.tickets)))
        self.counts_what_is_under_way()
        assert self.core.num_waiting == 0
        assert not self.core.in_flight._accounts and not any(self.policy.under_way.values())
        self.join("a")
        self.clock.now += LINGER_S + 0.1
        self.core.candidates(RoutingRequest(RequestId("last"), 1, tokens=pack_tokens([1])))
        assert len(self.core.in_flight._prefixes) == 0


TestCore = CoreMachine.TestCase
TestCore.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)


def test_a_replica_that_takes_what_another_refused_is_not_taken_for_idle():
    """What it had to do was not looked at: its speed is not learned from how long it took."""
    core = RoutingCore(PrefixIndex(), make_policy(rng=random.Random(0)), clock := ManualClock())
    rates = {name: ReplicaRates(Kind(1000.0, 0.01)) for name in "ab"}
    for name in "ab":
        core.join(SimpleNamespace(info=replica_info(name), load=Load(max_num_seqs=64), rates=rates[name]))
    ticket = core.submit(RoutingRequest(RequestId("r"), 1000, tokens=pack_tokens(range(1000))), lambda ticket: None)
    core.refused(ticket, OverloadedError("full", retry_after=1.0))
    clock.now += 50.0
    core.first_token(ticket, 0)
    assert {one.prefill_tokens_per_s for one in rates.values()} == {1000.0}


# The same through a dispatcher: what replicas answer, and what callers do

ANSWERS = ["whole", "whole", "full", "gone", "wrong", "dies before", "dies later", "broken later", "hangs"]
CALLERS = ["reads", "reads", "leaves after one", "is cancelled"]


class Client:
    """A replica that answers each request as the history says."""

    connected = True
    load = Load(kv_total_blocks=1000, max_num_seqs=64)

    def __init__(self, history):
        self.history, self.open = history, 0

    def start(self):
        pass

    async def close(self):
        pass

    async def submit(self, request):
        answer = self.history.pop() if self.history else "whole"
        await asyncio.sleep(0)
        if answer == "full":
            raise OverloadedError("full", retry_after=1.0)
        if answer == "gone":
            raise ReplicaUnavailableError("gone")
        if answer == "wrong":
            raise InvalidRequestError("wrong")
        self.open += 1
        return Stream(self, request, answer)


class Stream:
    def __init__(self, client, request, answer):
        self.client, self.request, self.answer = client, request, answer
        self.index, self.closed = len(request.output_token_ids), False

    def __aiter__(self):
        return self

    async def __anext__(self):
        await asyncio.sleep(0)
        if self.answer == "hangs":
            await asyncio.Event().wait()
        if self.answer == "dies before":
            raise ReplicaUnavailableError("died")
        done = self.index - len(self.request.output_token_ids)
        if done == 2 and self.answer == "dies later":
            raise ReplicaUnavailableError("died")
        if done == 2 and self.answer == "broken later":
            raise EngineError("broken")
        if done == 4:
            raise StopAsyncIteration
        self.index += 1
        return TokenDelta(
            request_id=self.request.request_id,
            index=self.index - 1,
            token_ids=[7],
            cached_tokens=None if done else 0,
            finish_reason=FinishReason.LENGTH if done == 3 else None,
        )

    def close(self):
        if not self.closed:
            self.closed, self.client.open = True, self.client.open - 1


async def call(dispatcher, number, behaviour, tokens):
    request = GenerateRequest(
        request_id=RequestId(f"r{number}"), prompt_token_ids=tokens, params=SamplingParams(max_tokens=4)
    )
    deltas = dispatcher.generate(request)
    try:
        async for _ in deltas:
            if behaviour == "leaves after one":
                break
    except (OverloadedError, ReplicaUnavailableError, InvalidRequestError, EngineError):
        pass
    finally:
        await deltas.aclose()


async def play(answers, callers, late):
    clock = ManualClock()
    bus = InMemoryBus(clock, "bus")
    clients = {}

    def connect(info, on_change):
        return clients.setdefault(info.replica, Client(answers[info.replica]))

    membership = Membership(bus, "", connect=connect, clock=clock)
    dispatcher = Dispatcher(
        membership, make_policy(rng=random.Random(0)), clock=clock, wait_s=0.05, late=LateBinding() if late else None
    )
    for name in answers:
        await bus.heartbeat(replica_info(name), 60.0)
    await membership.follower.follow_once(0.0)
    await membership.follower.follow_once(0.0)
    tasks = [
        asyncio.ensure_future(call(dispatcher, number, behaviour, [group] * 100))
        for number, (behaviour, group) in enumerate(callers)
    ]
    for _ in range(40):
        clock.now += 0.1
        dispatcher.core.pump()
        await asyncio.sleep(0)
    for task in tasks:  # those that are cancelled, and those whose replica hangs
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    core = dispatcher.core
    assert core.num_waiting == 0
    assert not core.in_flight._accounts
    assert {name: client.open for name, client in clients.items()} == dict.fromkeys(clients, 0)
    clock.now += LINGER_S + 0.1
    core.candidates(RoutingRequest(RequestId("last"), 1, tokens=pack_tokens([1])))
    assert len(core.in_flight._prefixes) == 0
    await membership.close()


histories = st.lists(st.sampled_from(ANSWERS), max_size=8)


@settings(max_examples=150, deadline=None)
@given(
    st.fixed_dictionaries(dict.fromkeys("abc", histories)),
    st.lists(st.tuples(st.sampled_from(CALLERS), st.integers(0, 2)), max_size=10),
    st.booleans(),
)
def test_nothing_is_under_way_once_all_have_ended(answers, callers, late):
    asyncio.run(play({name: list(history) for name, history in answers.items()}, callers, late))
