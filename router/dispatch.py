"""Takes a request to the best replica, to the next best when that one refuses, and its deltas back."""

import asyncio
import logging
import time
from collections import Counter, deque
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TypeGuard, cast

from ..cluster.errors import (
    DeadlineExceededError,
    OverloadedError,
    PoisonRequestError,
    ReplicaLostError,
    ReplicaUnavailableError,
    ServerError,
    WarmrootError,
)
from ..cluster.ids import BlockHash, ReplicaId
from ..cluster.messages import GenerateRequest, TokenDelta
from ..cluster.scaling_status import ScalingStatus
from ..cluster.within import within
from ..kv_store.hashing import salted
from ..kv_store.heat import HeatWindow
from .admission import QueueLimits
from .core import HISTORY, Decision, RoutingCore, Ticket
from .explain import explained
from .hold import Hold
from .journey import MAX_LOSSES, Journey
from .late_binding import LateBinding
from .membership import Member, Membership, ReplicaStream
from .openai.cluster_state import (
    OwnedPrefix,
    ReplicaStatus,
    RouterStatus,
    RoutingChoice,
    RoutingStats,
    ScalingStep,
    StoreStatus,
)
from .overview import Overview
from .policy import Policy, RoutingRequest
from .policy.base import Prefix
from .quarantine import Quarantine
from .question import question_of
from .trust import Trust, TrustedIndex
from .unheard import Unheard

WAIT_FOR_REPLICA_S = 30.0
LOOK_AGAIN_S = 0.2
"""How often replicas that refuse are asked again without any news, while there are no others."""
PUMP_EVERY_S = 0.05
"""How often those who wait in the router are looked at without any news."""

logger = logging.getLogger(__name__)


class Dispatcher:
    """``TokenGenerator`` over the replicas of a ``Membership``. Also the ``ClusterState`` that the API shows.

    Waits up to ``wait_s`` for a replica while there is none. ``late`` lets requests wait here while every good replica
    is busy. A request that was running on ``max_losses`` replicas as they died is not tried on another one.
    """

    def __init__(
        self,
        membership: Membership,
        policy: Policy,
        *,
        late: LateBinding | None = None,
        queue: QueueLimits | None = None,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
        wait_s: float = WAIT_FOR_REPLICA_S,
        max_losses: int = MAX_LOSSES,
        history: int = HISTORY,
    ) -> None:
        self._index = TrustedIndex(membership.index, Trust(clock))
        self.core = RoutingCore(self._index, policy, clock, late=late, queue=queue, history=history)
        self.hold = Hold(self.core.admission.limits, clock)
        """Who waits while there is no replica."""
        self._quarantine = Quarantine()
        self._unheard = Unheard(clock, self._known)
        self.heat = HeatWindow(clock)
        """What this router's requests share."""
        self.overview = Overview(membership, self.core, clock)
        self._clock = clock
        self._wall = wall
        self._warm_ups = 0
        self._migrations: Counter[str] = Counter()
        self._recomputed_tokens = 0
        self._membership = membership
        self._wait_s = wait_s
        self._max_losses = max_losses
        self._synced: Sequence[Member] | None = None
        self._pumping: asyncio.Task[None] | None = None

    @property
    def decisions(self) -> deque[Decision]:
        """The latest choices, newest last."""
        return self.core.decisions

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenDelta, None]:
        """See ``TokenGenerator``. When its replica is lost, another one goes on where it was, and nobody notices."""
        journey = Journey(request, self._clock, self._max_losses)
        with self.overview.watch(request) as watch:
            while True:
                leg = await self._set_out(journey)
                num_tokens = 0
                try:
                    if (delta := journey.take(leg.first)) is not None:
                        watch.saw(delta, leg.question.prompt_tokens)
                        yield delta
                    if leg.first.finish_reason is None:
                        async for news in leg.stream:
                            num_tokens += len(news.token_ids)
                            if (delta := journey.take(news)) is not None:
                                watch.saw(delta, leg.question.prompt_tokens)
                                yield delta
                    return
                except ReplicaLostError as error:
                    num_tokens = 0
                    self._note_loss(journey, error)
                finally:
                    leg.stream.close()
                    if not leg.ticket.moved:
                        self._note_heat(leg.question, leg.ticket, leg.first.cached_tokens or 0)
                    self.core.finish(leg.ticket, num_tokens)

    async def warm_up(self, replica: ReplicaId, request: GenerateRequest) -> None:
        """Have one replica serve a request for what it leaves in the cache. Raises what refuses or fails it."""
        self._warm_ups += 1
        ticket = self.core.assign(question_of(request), replica)
        try:
            stream = await cast(Member, ticket.member).client.submit(request)
            try:
                async for _ in stream:
                    pass
            finally:
                stream.close()
        finally:
            self.core.finish(ticket)

    def ready(self) -> Sequence[Member]:
        """Who can be given a request now: the same object until that changes."""
        return self._membership.ready()

    def sync(self) -> RoutingCore:
        """The core, with the latest word of all who are ready."""
        self._sync(self.ready())
        return self.core

    def replicas(self) -> list[ReplicaStatus]:
        """Every known replica."""
        return self._membership.replicas()

    def routing(self) -> RoutingStats:
        """What was decided since start."""
        core, hold = self.core.routing(), self.hold
        return replace(
            core,
            waiting=core.waiting + hold.num_requests,
            waiting_tokens=core.waiting_tokens + hold.tokens,
            refused=Counter(core.refused) + Counter(full=hold.refused),
            event_lag_s=self._membership.follower.event_lag_s.counts(),
            joined=dict(self._membership.joined),
            gone=dict(self._membership.gone),
            warm_ups=self._warm_ups,
            migrations=dict(self._migrations),
            recomputed_tokens=self._recomputed_tokens,
        )

    def explain(self, request_id: str = "", limit: int = 1) -> list[RoutingChoice]:
        """The latest choices, newest first, for requests whose id begins with ``request_id``."""
        return explained(reversed(self.decisions), request_id, limit, self._wall() - self._clock())

    def store(self) -> StoreStatus:
        """What the index is fed from."""
        return self._membership.store()

    def routers(self) -> list[RouterStatus]:
        """The router itself, and those that it hears."""
        return self.overview.routers()

    def prefixes(self, limit: int) -> list[OwnedPrefix]:
        """At most ``limit`` nodes of the tree of prefixes, hot ones and the latest; parents before children."""
        return self.overview.prefixes(limit)

    def scaling(self) -> Sequence[ScalingStep]:
        """What the autoscaler has decided lately, newest first."""
        return self.overview.steps

    def autoscalers(self) -> Sequence[ScalingStatus]:
        """What it decides now; none if nobody does."""
        return self.overview.autoscalers()

    def _claimed(self, question: RoutingRequest, ticket: Ticket) -> int:
        """Prompt tokens that the index says the chosen replica has; what is in flight proves nothing."""
        if ticket.member is None:
            return 0
        info = ticket.member.info
        namespace = salted(BlockHash(info.kv_namespace), question.salt)
        return self._known(info.replica, Prefix(namespace, info.block_size, question.tokens))

    def _known(self, replica: ReplicaId, prefix: Prefix) -> int:
        return self._index.claimed(replica, prefix.namespace, prefix.tokens, prefix.block_size)

    def _correct(self, ticket: Ticket, claimed_tokens: int, cached_tokens: int | None) -> None:
        """Hold the index against what the replica found."""
        replica = ticket.replica
        if replica is None or cached_tokens is None:
            return
        if self._index.trust.observe(replica, claimed_tokens, cached_tokens):
            logger.warning("replica %s lacks what the index claims of it: resyncing", replica)
            self._membership.resync(replica)

    def _listen(self, ticket: Ticket, cached_tokens: int | None) -> None:
        """What a replica found, it must have told, or will within moments."""
        if ticket.reservation is not None and cached_tokens:
            self._unheard.found(ticket.reservation.replica, ticket.reservation.prefix, cached_tokens)
        for replica in self._unheard.silent():
            logger.warning("replica %s does not tell what it has cached: resyncing", replica)
            self._membership.resync(replica)

    def _note_heat(self, question: RoutingRequest, ticket: Ticket, cached_tokens: int) -> None:
        """Before the ticket ends: it holds a slot, and had the replica to itself while its prompt was computed."""
        member = ticket.member
        if member is None or not cached_tokens:
            return
        info, uncached = member.info, question.prompt_tokens - cached_tokens
        busy_s = member.rates.prefill_s(uncached) + (self._clock() - ticket.first_at) / info.max_num_seqs
        namespace = BlockHash(info.kv_namespace)
        self.heat.note(namespace, info.block_size, question.salt, question.tokens, cached_tokens, busy_s)

    async def _set_out(self, journey: Journey) -> "_Leg":
        """From a replica that has given a first delta. Waits for one, within the limit, while none takes it."""
        give_up_at = self._clock() + self._wait_s
        while True:
            question = replace(question_of(journey.request(), self._wall() - self._clock()), weights=journey.weights)
            if journey.is_suspect:
                began = self._clock()
                question = await self._kept_apart(question)
                give_up_at += self._clock() - began  # its own limit is the deadline
            ticket = await self._submit(question, moved=journey.num_moves > 0)
            if journey.is_suspect and not self._quarantine.enter(ticket):
                self.core.finish(ticket)
                await self._membership.wait_changed(LOOK_AGAIN_S)
                continue
            try:
                return await self._first_delta(ticket, journey, question)
            except BaseException as error:
                self.core.finish(ticket)
                comes_back = isinstance(error, ReplicaUnavailableError) or (journey.num_moves and _is_refusal(error))
                if not comes_back or (left := give_up_at - self._clock()) <= 0:
                    raise
            await self._membership.wait_changed(min(left, LOOK_AGAIN_S))

    def _note_loss(self, journey: Journey, error: ReplicaLostError) -> None:
        """Raises PoisonRequestError when it shall not go on elsewhere."""
        self._migrations[error.reason] += 1
        journey.lost(error)

    async def _kept_apart(self, question: RoutingRequest) -> RoutingRequest:
        """Where no other suspect is, once there is such a replica with room for it, or none at all with room.

        Raises DeadlineExceededError.
        """
        while self._quarantine.fills(
            member.info.replica for member in self.ready() if member.info.max_model_len >= question.context_tokens
        ):
            if self._clock() >= question.deadline:
                raise DeadlineExceededError("the request's deadline passed while other suspects were on every replica")
            await self._membership.wait_changed(LOOK_AGAIN_S)
        return replace(question, avoid=self._quarantine.replicas)

    async def _submit(self, question: RoutingRequest, *, moved: bool) -> Ticket:
        """A ticket that is bound to a replica."""
        ready = self.ready()
        if not ready:
            ready = await self._wait_for_first(question, moved=moved)
            question = replace(question, admitted=True)  # whoever was told to wait is not refused afterwards
        self._sync(ready)
        bound = asyncio.Event()
        ticket = self.core.submit(question, lambda ticket: bound.set(), moved=moved)
        if ticket.replica is None:
            self._pump()
            try:
                await self._wait_for(bound)
            except BaseException:
                self.core.finish(ticket)
                raise
        if ticket.refused is not None:
            raise ticket.refused
        return ticket

    async def _wait_for_first(self, question: RoutingRequest, *, moved: bool) -> Sequence[Member]:
        """Who is ready, once someone is. Raises what ends the waiting, or refuses it."""
        with self.hold.place(question, moved=moved):
            ready = await self._membership.wait_ready(min(self._wait_s, question.deadline - self._clock()))
            if ready:
                self.hold.end()
        if not ready and self._clock() >= question.deadline:
            raise DeadlineExceededError("the request's deadline passed while no replica was ready")
        if not ready:
            raise ReplicaUnavailableError(f"no replica is ready (waited {self._wait_s:g} s)")
        return ready

    def _sync(self, ready: Sequence[Member]) -> None:
        if ready is self._synced:
            self.core.fleet.listen()
        else:
            self.core.sync(ready)
            self._synced = ready

    async def _wait_for(self, bound: asyncio.Event) -> None:
        while not await _is_set(bound, self._wait_s):
            if not len(self.core.fleet):
                raise ReplicaUnavailableError(f"no replica is ready (waited {self._wait_s:g} s)")

    async def _first_delta(self, ticket: Ticket, journey: Journey, question: RoutingRequest) -> "_Leg":
        """From the replica it is bound to, or from the next best that takes it and lives."""
        chosen, claimed = ticket.replica, self._claimed(question, ticket)
        refusals: list[WarmrootError] = []
        while ticket.member is not None:
            journey.taken_by(ticket.replica)
            stream = None
            try:
                stream = await cast(Member, ticket.member).client.submit(journey.request())
                first = await anext(stream)
            except BaseException as error:
                if stream is not None:
                    stream.close()
                if not (isinstance(error, ReplicaLostError) or (stream is None and _is_refusal(error))):
                    raise
                if isinstance(error, ReplicaLostError):
                    self._note_loss(journey, error)
                    if journey.is_suspect:
                        raise
                refusals.append(error)
                self.core.refused(ticket, error)
                if journey.is_suspect and not self._quarantine.enter(ticket):
                    break  # another one came there meanwhile
                continue
            self.core.first_token(ticket, first.cached_tokens)
            if claimed and ticket.replica == chosen:
                self._correct(ticket, claimed, first.cached_tokens)
            self._listen(ticket, first.cached_tokens)
            journey.begins_on(cast(Member, ticket.member).info)
            if journey.has_begun:
                self._recomputed_tokens += question.prompt_tokens - (first.cached_tokens or 0)
            return _Leg(question, ticket, stream, ticket.reported(first))
        raise _refused(refusals)

    def _pump(self) -> None:
        """See that nobody waits for news that do not come."""
        if self._pumping is None or self._pumping.done():
            self._pumping = asyncio.get_running_loop().create_task(self._pump_while_waiting())

    async def _pump_while_waiting(self) -> None:
        while self.core.num_waiting:
            await asyncio.sleep(PUMP_EVERY_S)
            try:
                self._sync(self._membership.ready())
                self.core.pump()
            except Exception:
                logger.exception("looking at those who wait failed; going on")


@dataclass(frozen=True, slots=True)
class _Leg:
    """A part of a request's journey: one replica, which has given a first delta."""

    question: RoutingRequest
    ticket: Ticket
    stream: ReplicaStream
    first: TokenDelta


def _is_refusal(error: BaseException) -> TypeGuard[WarmrootError]:
    """Whether another replica may take what this one did not."""
    return isinstance(error, (OverloadedError, ServerError)) and not isinstance(
        error, (DeadlineExceededError, PoisonRequestError)
    )


async def _is_set(event: asyncio.Event, timeout_s: float) -> bool:
    """Whether it is set now or within that time."""
    with suppress(asyncio.TimeoutError):
        await within(timeout_s, event.wait())
    return event.is_set()


def _refused(refusals: list[WarmrootError]) -> WarmrootError:
    """One error for all: busy if any was merely busy, for then a later try may succeed."""
    waits = [error.retry_after for error in refusals if isinstance(error, OverloadedError)]
    if waits:
        return OverloadedError("every replica's queue is full", retry_after=min(waits))
    return refusals[-1] if refusals else ReplicaUnavailableError("no replica could be chosen")
