"""The decisions of one router, without any waiting or talking: the same code in an ingress and in a simulator.

Whoever uses it says which replicas there are, submits requests, and tells of first tokens, refusals and ends. The core
answers where each request goes; one that had better wait is bound later, when a replica has become free for it.
"""

from collections import Counter, deque
from collections.abc import Callable, Iterable

import numpy as np

from ..cluster.errors import DeadlineExceededError, WarmrootError
from ..cluster.histogram import Histogram
from ..cluster.ids import BlockHash, ReplicaId
from ..kv_store.hashing import salted
from .admission import Admission, Prospect, QueueLimits
from .cached_columns import CachedColumns
from .fleet import Fleet, KnownReplica
from .late_binding import LateBinding
from .matching_index import MatchingIndex
from .openai.cluster_state import DECISION_S, WAIT_S, RoutingStats
from .peers import Peers
from .policy.base import Candidates, Column, Numbers, Policy, Prefix, Ranking, RoutingRequest
from .policy.in_flight import Account, InFlight
from .policy.warm_prefix import decode_slowdown
from .ticket import Decision, Ticket
from .waiting_line import Claim, WaitingLine
from .work import WorkMeter

HISTORY = 1024
OTHER_WEIGHTS_S = 1e8
"""What it costs to go on with weights that a sequence has not begun with."""
MIN_DECODE_SAMPLE = 16
"""Tokens of an output from which the decode rate is learned."""
UNFIT_S = 1e9
"""What a replica costs that a request had better not go to: more than any other."""


class RoutingCore:
    """Chooses among the replicas that ``join``; ``clock`` gives monotonic seconds, ``index`` what they have cached.

    ``late`` None binds every request at once. ``tokens_per_id``: prompt tokens that a packed id stands for; above 1 in
    a simulation of traces that name whole blocks. ``decisions`` are the latest, newest last. Routers that share their
    words (``peers``) must have different ``name``s.
    """

    def __init__(
        self,
        index: MatchingIndex,
        policy: Policy,
        clock: Callable[[], float],
        *,
        late: LateBinding | None = None,
        queue: QueueLimits | None = None,
        tokens_per_id: int = 1,
        history: int = HISTORY,
        name: str = "",
    ) -> None:
        self.policy = policy
        self.fleet = Fleet(tokens_per_id)
        self.in_flight = InFlight(clock, on_change=self._account_changed)
        self.peers = Peers(name, clock, self._peers_changed)
        self.work = WorkMeter(clock)
        self.decisions: deque[Decision] = deque(maxlen=history)
        self._index = index
        self._cached = CachedColumns(index.slots)
        self._sent = CachedColumns(self.in_flight.slots)
        self._clock = clock
        self._late = policy.binding(late)
        limits = queue or QueueLimits()
        self._line = WaitingLine[Ticket](self._late.aging if self._late else 0.0, limits.max_wait_s / 2)
        self.admission = Admission(self._line, limits, clock)
        self._tokens_per_id = tokens_per_id
        self._news_at = clock()
        self._reasons: Counter[tuple[str, str]] = Counter()
        self._predicted = self._actual = self._best = self._colder = 0
        self._decision_s, self._wait_s = Histogram(DECISION_S), Histogram(WAIT_S)

    @property
    def num_waiting(self) -> int:
        """Requests that wait in the router."""
        return len(self._line)

    @property
    def waiting_tokens(self) -> int:
        """Prompt tokens that these want computed."""
        return self._line.tokens()

    def sync(self, replicas: Iterable[KnownReplica]) -> None:
        """These are the replicas that may be chosen now, with their latest words."""
        fleet, present = self.fleet, set[ReplicaId]()
        for replica in replicas:
            name = replica.info.replica
            place = fleet.place(name)
            if place is None or fleet.member(name) is not replica:
                self.join(replica)
            else:
                fleet.told(place, replica.load)
            present.add(name)
        if len(present) < len(fleet):
            for name in [name for name in fleet.names if name not in present]:
                self.leave(name)

    def join(self, replica: KnownReplica) -> None:
        """A replica may be chosen from now on; another one of its name may not any more."""
        name = replica.info.replica
        if name in self.fleet:
            if self.fleet.member(name) is replica:
                return
            self.leave(name)
        self.fleet.join(replica, self.peers.with_theirs(name, self.in_flight.account(name)))

    def leave(self, replica: ReplicaId) -> None:
        """It gets no new request; what it has goes on."""
        self.fleet.leave(replica)
        self.in_flight.left(replica)
        self.policy.left(replica)

    def submit(self, request: RoutingRequest, on_bound: Callable[[Ticket], None], *, moved: bool = False) -> Ticket:
        """Choose for a request and reserve its place there, or let it wait. There must be a replica.

        End it with ``finish``, however it ends; ``on_bound`` is called only if it waited. One that a replica had
        accepted (``moved``) does not wait again. Raises OverloadedError when the queue is full for it, and
        DeadlineExceededError when it cannot be done in time.
        """
        ticket = Ticket(request, on_bound, self._clock(), moved=moved)
        candidates, ranking = self._rank(ticket)
        if not moved:
            self.work.arrived(float(candidates.prefill_s(candidates.uncached(request.prompt_tokens))[ranking.place]))
        if moved or self._may_bind(ticket, candidates, ranking):
            self._bind(ticket, candidates, ranking)
        else:
            self._line_up(ticket, candidates, ranking)
        return ticket

    def assign(self, request: RoutingRequest, replica: ReplicaId) -> Ticket:
        """Reserve a place on a replica that someone else has chosen."""
        ticket = Ticket(request, _ignore, self._clock())
        cached = self.candidates(request).cached_tokens
        self._reserve(ticket, replica, int(cached[self.fleet.names.index(replica)]))
        return ticket

    def refused(self, ticket: Ticket, error: WarmrootError) -> None:
        """Its replica did not take it: it is bound to the next best, if not all were tried."""
        decision = ticket.decision
        if decision is None:
            return
        self._release(ticket)
        ticket.idle = False  # what the next one has to do was not looked at
        decision.refusals.append(error)
        for ranked in decision.ranking:
            if ranked.replica not in ticket.tried | ticket.request.avoid and ranked.replica in self.fleet:
                self._reserve(ticket, ranked.replica, int(decision.cached.get(ranked.replica, 0)))
                return

    def first_token(self, ticket: Ticket, cached_tokens: int | None) -> None:
        """The replica found so many tokens cached and computed the others."""
        reservation, decision = ticket.reservation, ticket.decision
        if reservation is None or decision is None:
            return
        ticket.first_at = self._news_at = self._clock()
        if not ticket.moved:
            self.work.first_token(ticket.first_at - ticket.arrived, reservation.prefill_s)
        self._wait_s.observe(ticket.bound_at - ticket.arrived)
        self.in_flight.first_token(reservation)
        self.policy.first_token(ticket.request, reservation.replica)
        self._note(decision, reservation.replica, cached_tokens, moved=ticket.moved)
        if ticket.idle and cached_tokens is not None and reservation.replica in self.fleet:
            uncached = ticket.request.prompt_tokens - cached_tokens
            self._learn_prefill(reservation.replica, uncached, ticket.first_at - reservation.began)
        self.pump()

    def finish(self, ticket: Ticket, output_tokens: int = 0) -> None:
        """It ended, well or not, or need not be served any more. Idempotent.

        ``output_tokens`` came after the first token of a request that ended well.
        """
        if self._line.discard(ticket):
            self.admission.left()
            return
        self._news_at = self._clock()
        self._line.shares.charge(ticket.request.tenant, output_tokens)
        if ticket.reservation is not None and output_tokens >= MIN_DECODE_SAMPLE:
            self.work.decoded(output_tokens, self._news_at - ticket.first_at)
            self._learn_decode(ticket.reservation.replica, (self._news_at - ticket.first_at) / output_tokens)
        self._release(ticket)
        self.pump()

    def pump(self) -> None:
        """Bind those that wait and need not any more. Call it now and then: backlogs shrink as time goes by."""
        if self._late is None or not len(self._line):
            return
        now = self._clock()
        for ticket in self._line.expire(now):
            self.admission.refused["expired"] += 1
            self._give_up(
                ticket, DeadlineExceededError(f"the request waited {now - ticket.arrived:.1f} s for a replica")
            )
        self.admission.left()
        if not len(self._line) or not len(self.fleet):
            return
        stalled = now - self._news_at > self._late.stall_s
        if not stalled and not self._late.any_free(self.fleet.candidates(now)):
            return
        chosen: dict[int, tuple[Candidates, Ranking]] = {}
        wanted = self._wanted()

        def ready(ticket: Ticket) -> bool:
            nonlocal stalled
            candidates, ranking = chosen[id(ticket)] = self._rank(ticket, wanted)
            forced, stalled = stalled, False
            goes = forced or self._is_free(candidates, ranking)
            wanted[ranking.place] -= goes
            return goes

        for ticket in self._line.take(self._late.tries, ready, now):
            self._bind(ticket, *chosen[id(ticket)])
            ticket.on_bound(ticket)
        self.admission.left()

    def routing(self) -> RoutingStats:
        """What was decided since start."""
        reservations, reserved_tokens = self.in_flight.reserved()
        return RoutingStats(
            decisions=dict(self._reasons),
            predicted_hit_tokens=self._predicted,
            actual_hit_tokens=self._actual,
            best_hit_tokens=self._best,
            colder_choices=self._colder,
            decision_s=self._decision_s.counts(),
            wait_s=self._wait_s.counts(),
            reservations=reservations,
            reserved_tokens=reserved_tokens,
            waiting=len(self._line),
            waiting_tokens=self._line.tokens(),
            refused=dict(self.admission.refused),
            promises=self.admission.promises.counts(),
        )

    def choose(self, request: RoutingRequest) -> tuple[Candidates, Ranking]:
        """What the policy chooses from now, and its choice; nothing is reserved."""
        candidates, unfit = self.candidates(request), self.fleet.unfit(request)
        ranking = self.policy.choose(request, candidates)
        others = self.fleet.with_other_weights(request)
        ranking = ranking if unfit is None else ranking.dearer(unfit, UNFIT_S)
        return candidates, ranking if others is None else ranking.dearer(others, OTHER_WEIGHTS_S)

    def candidates(self, request: RoutingRequest) -> Candidates:
        """What the policy would choose from now."""
        fleet, tokens = self.fleet, request.tokens
        candidates = fleet.candidates(self._clock())
        row = candidates.cached_tokens
        for namespace, block_size in fleet.caches if tokens else ():
            prefix = Prefix(salted(namespace, request.salt), block_size, tokens)
            held = self._index.held(prefix.namespace, tokens, block_size)
            self._cached.write(held, row, fleet.names, fleet.version)
            self._sent.write(self.in_flight.held(prefix), row, fleet.names, fleet.version)
            for name, held_tokens in self.peers.match(prefix).items():
                place = fleet.place(name)
                if place is not None and row[place] < held_tokens:
                    row[place] = held_tokens
        if self._tokens_per_id != 1:
            row *= self._tokens_per_id
        return candidates

    def _wanted(self) -> Numbers:
        """How many of those that wait prefer each replica."""
        wanted = np.zeros(len(self.fleet))
        for ticket in self._line:
            if (place := self._preferred(ticket)) is not None:
                wanted[place] += 1
        return wanted

    def _preferred(self, ticket: Ticket) -> int | None:
        return None if ticket.preferred is None else self.fleet.place(ticket.preferred)

    def _rank(self, ticket: Ticket, wanted: Numbers | None = None) -> tuple[Candidates, Ranking]:
        """``wanted``, while it waits: by how many in line, itself among them."""
        began = self._clock()
        candidates, ranking = self.choose(ticket.request)
        if self._late is not None and wanted is not None:
            if (place := self._preferred(ticket)) is not None:
                wanted[place] -= 1
            ranking = self._late.after(began - ticket.arrived, candidates, ranking, wanted > 0)
            wanted[ranking.place] += 1
        ticket.preferred = self.fleet.names[ranking.place]
        ticket.decision = Decision(
            ticket.request.request_id,
            ticket.request.prompt_tokens,
            ranking,
            candidates.cached_tokens,
            self._clock() - began,
            began,
        )
        return candidates, ranking

    def _may_bind(self, ticket: Ticket, candidates: Candidates, ranking: Ranking) -> bool:
        """Unless its replica is busy, or one that has waited longer wants the same."""
        if not self._is_free(candidates, ranking):
            return False
        if self._late is None or not self._late.in_turn or not len(self._line):
            return True
        return all(other.preferred != ticket.preferred for other in self._line)

    def _is_free(self, candidates: Candidates, ranking: Ranking) -> bool:
        return self._late is None or self._late.is_free(candidates, ranking.place)

    def _line_up(self, ticket: Ticket, candidates: Candidates, ranking: Ranking) -> None:
        """Let it wait, if it may. Raises what refuses it."""
        request, now, place = ticket.request, ticket.arrived, ranking.place
        uncached = candidates.uncached(request.prompt_tokens)
        claim = Claim(int(uncached[place]), request.priority, request.tenant, request.share)
        if not request.admitted:
            prospect = Prospect(
                guess_per_s=float((1 / candidates.table[Column.PREFILL_TOKEN_S]).sum()),
                replicas=len(candidates),
                prefill_s=float(candidates.prefill_s(uncached).min()),
                left_s=request.deadline - now,
            )
            asked = claim._replace(tokens=claim.tokens + request.company_tokens)
            for other, error in self.admission.admit(request, asked, prospect, now):
                self._give_up(other, error)
        expires = min(request.deadline, now + self.admission.limits.timeout_s)
        self._line.put(ticket, self._work(ticket, candidates, ranking), now, claim, expires)
        self.admission.rate.begin(now)

    def _give_up(self, ticket: Ticket, error: WarmrootError) -> None:
        """It has left the line, and gets no replica."""
        ticket.refused = error
        ticket.on_bound(ticket)

    def _work(self, ticket: Ticket, candidates: Candidates, ranking: Ranking) -> float:
        late = self._late
        return late.work(candidates, ranking.place, ticket.request.prompt_tokens) if late else 0.0

    def _bind(self, ticket: Ticket, candidates: Candidates, ranking: Ranking) -> None:
        place = ranking.place
        ticket.idle = not candidates.backlog_s[place]
        if ticket.decision is not None:
            self.decisions.append(ticket.decision)
        uncached = int(candidates.uncached(ticket.request.prompt_tokens)[place])
        ticket.bound_at = now = self._clock()
        self.admission.rate.drained(uncached, now, ticket.request.priority)
        self._line.shares.charge(ticket.request.tenant, uncached)
        self._reserve(ticket, candidates.names[place], int(candidates.cached_tokens[place]))

    def _reserve(self, ticket: Ticket, replica: ReplicaId, cached_tokens: int) -> None:
        request, member = ticket.request, self.fleet.member(replica)
        uncached = max(1, request.prompt_tokens - cached_tokens)
        info = member.info
        prefix = Prefix(salted(BlockHash(info.kv_namespace), request.salt), info.block_size, request.tokens)
        seconds = member.rates.prefill_s(uncached)
        ticket.tried.add(replica)
        ticket.member = member
        ticket.reservation = self.in_flight.reserve(replica, prefix, request.prompt_tokens, uncached, seconds)
        self.peers.reserved(ticket.reservation)
        self.policy.routed(request, replica)

    def _account_changed(self, replica: ReplicaId, account: Account) -> None:
        self.peers.note(replica, account)
        self.fleet.sent(replica, self.peers.with_theirs(replica, account))

    def _peers_changed(self, replica: ReplicaId) -> None:
        self.fleet.sent(replica, self.peers.with_theirs(replica, self.in_flight.account(replica)))

    def _release(self, ticket: Ticket) -> None:
        reservation, ticket.reservation, ticket.member = ticket.reservation, None, None
        if reservation is not None:
            self.in_flight.release(reservation)
            self.policy.finished(ticket.request, reservation.replica)

    def _learn_prefill(self, replica: ReplicaId, uncached_tokens: int, seconds: float) -> None:
        self.fleet.member(replica).rates.observe_prefill(uncached_tokens, seconds)
        self.fleet.learned(replica)

    def _learn_decode(self, replica: ReplicaId, seconds_per_token: float) -> None:
        if replica in self.fleet:
            member = self.fleet.member(replica)
            member.rates.observe_decode(seconds_per_token, decode_slowdown(min(1.0, member.load.kv_usage)))
            self.fleet.learned(replica)

    def _note(self, decision: Decision, replica: ReplicaId, cached_tokens: int | None, *, moved: bool) -> None:
        ranked = next(ranked for ranked in decision.ranking if ranked.replica == replica)
        decision.chosen = ranked
        decision.predicted_tokens = int(decision.cached_tokens[decision.ranking.names.index(replica)])
        decision.actual_tokens = cached_tokens
        reason = "moved" if moved else "refused" if decision.refusals else ranked.reason
        self._reasons[self.policy.name, reason] += 1
        self._decision_s.observe(decision.seconds)
        if moved:  # its prompt counted when it was routed first
            return
        best = int(decision.cached_tokens.max())
        self._predicted += decision.predicted_tokens
        self._actual += cached_tokens or 0
        self._best += best
        self._colder += decision.predicted_tokens < best


def _ignore(ticket: Ticket) -> None:
    """Nobody waits for it."""
