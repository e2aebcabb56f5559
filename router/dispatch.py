"""Takes a request to the best replica, to the next best when that one refuses, and its deltas back."""

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import cast

from ..cluster.errors import InvalidRequestError, OverloadedError, ReplicaUnavailableError, ServerError, WarmrootError
from ..cluster.ids import BlockHash, ReplicaId
from ..cluster.messages import GenerateRequest, TokenDelta
from ..kv_store.hashing import pack_tokens, salted
from ..kv_store.heat import HeatWindow
from .core import HISTORY, Decision, RoutingCore, Ticket
from .explain import explained
from .late_binding import LateBinding
from .membership import Member, Membership, ReplicaStream
from .openai.cluster_state import ReplicaStatus, RoutingChoice, RoutingStats, StoreStatus
from .policy import Policy, RoutingRequest
from .trust import Trust, TrustedIndex

WAIT_FOR_REPLICA_S = 30.0
PUMP_EVERY_S = 0.05
"""How often those who wait in the router are looked at without any news."""

logger = logging.getLogger(__name__)


class Dispatcher:
    """``TokenGenerator`` over the replicas of a ``Membership``. Also the ``ClusterState`` that the API shows.

    Waits up to ``wait_s`` for the first replica. ``late`` lets requests wait here while every good replica is busy.
    """

    def __init__(
        self,
        membership: Membership,
        policy: Policy,
        *,
        late: LateBinding | None = None,
        clock: Callable[[], float] = time.monotonic,
        wait_s: float = WAIT_FOR_REPLICA_S,
        history: int = HISTORY,
    ) -> None:
        self._index = TrustedIndex(membership.index, Trust(clock))
        self.core = RoutingCore(self._index, policy, clock, late=late, history=history)
        self.heat = HeatWindow(clock)
        """What this router's requests share."""
        self._clock = clock
        self._warm_ups = 0
        self._membership = membership
        self._wait_s = wait_s
        self._synced: Sequence[Member] | None = None
        self._pumping: asyncio.Task[None] | None = None

    @property
    def decisions(self) -> deque[Decision]:
        """The latest choices, newest last."""
        return self.core.decisions

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenDelta, None]:
        """See ``TokenGenerator``. A replica that fails after its first delta ends the stream with its error."""
        question = _question(request)
        ticket = await self._submit(question)
        num_tokens = 0
        try:
            chosen, claimed = ticket.replica, self._claimed(question, ticket)
            stream, first = await self._first_delta(ticket, request)
            try:
                self.core.first_token(ticket, first.cached_tokens)
                if claimed and ticket.replica == chosen:
                    self._correct(ticket, claimed, first.cached_tokens)
                yield replace(first, replica=ticket.replica)
                if first.finish_reason is None:
                    async for delta in stream:
                        num_tokens += len(delta.token_ids)
                        yield delta
            finally:
                stream.close()
                self._note_heat(question, ticket, first.cached_tokens or 0)
        finally:
            self.core.finish(ticket, num_tokens)

    async def warm_up(self, replica: ReplicaId, request: GenerateRequest) -> None:
        """Have one replica serve a request for what it leaves in the cache. Raises what refuses or fails it."""
        self._warm_ups += 1
        ticket = self.core.assign(_question(request), replica)
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
        return replace(self.core.routing(), warm_ups=self._warm_ups)

    def explain(self, request_id: str = "", limit: int = 1) -> list[RoutingChoice]:
        """The latest choices, newest first, for requests whose id begins with ``request_id``."""
        return explained(reversed(self.decisions), request_id, limit)

    def store(self) -> StoreStatus:
        """What the index is fed from."""
        return self._membership.store()

    def _claimed(self, question: RoutingRequest, ticket: Ticket) -> int:
        """Prompt tokens that the index says the chosen replica has; what is in flight proves nothing."""
        if ticket.member is None:
            return 0
        info = ticket.member.info
        namespace = salted(BlockHash(info.kv_namespace), question.salt)
        return self._index.claimed(info.replica, namespace, question.tokens, info.block_size)

    def _correct(self, ticket: Ticket, claimed_tokens: int, cached_tokens: int | None) -> None:
        """Hold the index against what the replica found."""
        replica = ticket.replica
        if replica is None or cached_tokens is None:
            return
        if self._index.trust.observe(replica, claimed_tokens, cached_tokens):
            logger.warning("replica %s lacks what the index claims of it: resyncing", replica)
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

    async def _submit(self, question: RoutingRequest) -> Ticket:
        """A ticket that is bound to a replica."""
        ready = await self._membership.wait_ready(self._wait_s)
        if not ready:
            raise ReplicaUnavailableError(f"no replica is ready (waited {self._wait_s:g} s)")
        self._sync(ready)
        bound = asyncio.Event()
        ticket = self.core.submit(question, lambda ticket: bound.set())
        if ticket.replica is None:
            self._pump()
            try:
                await self._wait_for(bound)
            except BaseException:
                self.core.finish(ticket)
                raise
        return ticket

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

    async def _first_delta(self, ticket: Ticket, request: GenerateRequest) -> tuple[ReplicaStream, TokenDelta]:
        """From the replica it is bound to, or from the next best that takes it."""
        refusals: list[WarmrootError] = []
        while ticket.member is not None:
            stream = None
            try:
                stream = await cast(Member, ticket.member).client.submit(request)
                first = await anext(stream)
            except (OverloadedError, ServerError) as error:
                if stream is not None:
                    stream.close()
                refusals.append(error)
                self.core.refused(ticket, error)
            except BaseException:
                if stream is not None:
                    stream.close()
                raise
            else:
                return stream, first
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


async def _is_set(event: asyncio.Event, timeout_s: float) -> bool:
    """Whether it is set now or within that time."""
    with suppress(asyncio.TimeoutError):
        await asyncio.wait_for(event.wait(), timeout_s)
    return event.is_set()


def _question(request: GenerateRequest) -> RoutingRequest:
    """What decides where it goes: the output of an earlier replica counts as prompt."""
    try:
        tokens = request.packed_prompt or pack_tokens(request.prompt_token_ids)
        if request.output_token_ids:
            tokens += pack_tokens(request.output_token_ids)
    except (OverflowError, TypeError) as error:
        raise InvalidRequestError(f"the prompt has a value that is no token id: {error}", param="prompt") from error
    num_tokens = len(request.prompt_token_ids) + len(request.output_token_ids)
    limit = request.params.max_tokens
    most = float("inf") if limit is None else max(0, limit - len(request.output_token_ids))
    return RoutingRequest(request.request_id, num_tokens, request.session, tokens, request.cache_salt, most)


def _refused(refusals: list[WarmrootError]) -> WarmrootError:
    """One error for all: busy if any was merely busy, for then a later try may succeed."""
    waits = [error.retry_after for error in refusals if isinstance(error, OverloadedError)]
    if waits:
        return OverloadedError("every replica's queue is full", retry_after=min(waits))
    return refusals[-1] if refusals else ReplicaUnavailableError("no replica could be chosen")
