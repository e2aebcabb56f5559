"""Takes a request to the best replica, to the next best when that one refuses, and its deltas back."""

import time
from collections import Counter, deque
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass, field, replace

from ..cluster.errors import InvalidRequestError, OverloadedError, ReplicaUnavailableError, ServerError, WarmrootError
from ..cluster.ids import ReplicaId, RequestId
from ..cluster.messages import GenerateRequest, TokenDelta
from ..kv_store.hashing import TOKEN_BYTES, pack_tokens
from .membership import Member, Membership, ReplicaStream
from .openai.cluster_state import ReplicaStatus, RoutingStats
from .policy import Candidate, Policy, Ranked, RoutingRequest
from .policy.in_flight import InFlight, Reservation
from .routing_view import RoutingView, prefix_of

HISTORY = 1024
WAIT_FOR_REPLICA_S = 30.0
MIN_DECODE_SAMPLE = 16
"""Tokens of an output from which the decode rate is learned."""


@dataclass(slots=True, eq=False)
class Decision:
    """Why a request went where it went."""

    request_id: RequestId
    prompt_tokens: int
    ranked: list[Ranked]
    """All candidates with their costs, best first."""
    cached: dict[ReplicaId, int]
    """Prompt tokens that each candidate was expected to have cached."""
    seconds: float
    """Time the choice took."""
    chosen: Ranked | None = None
    """Who accepted."""
    predicted_tokens: int = 0
    actual_tokens: int | None = None
    """Cached tokens that the chosen replica found, once it has said so."""
    refusals: list[WarmrootError] = field(default_factory=list[WarmrootError])


@dataclass(slots=True, eq=False)
class _Attempt:
    """A request on its way through one replica."""

    member: Member
    reservation: Reservation
    idle: bool
    """The replica had nothing else to do when the request was sent."""
    first_at: float = 0.0
    num_tokens: int = 0


class Dispatcher:
    """``TokenGenerator`` over the replicas of a ``Membership``. Also the ``ClusterState`` that the API shows.

    Waits up to ``wait_s`` for the first replica. ``decisions`` are the latest choices, newest last.
    """

    def __init__(
        self,
        membership: Membership,
        policy: Policy,
        *,
        clock: Callable[[], float] = time.monotonic,
        wait_s: float = WAIT_FOR_REPLICA_S,
        history: int = HISTORY,
    ) -> None:
        self.decisions: deque[Decision] = deque(maxlen=history)
        self._membership = membership
        self._policy = policy
        self._clock = clock
        self._wait_s = wait_s
        self._in_flight = InFlight(clock)
        self._view = RoutingView(membership.index, self._in_flight)
        self._reasons: Counter[tuple[str, str]] = Counter()
        self._predicted = self._actual = self._best = 0

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenDelta, None]:
        """See ``TokenGenerator``. A replica that fails after its first delta ends the stream with its error."""
        tokens = _pack(request)
        members = {member.info.replica: member for member in await self._membership.wait_ready(self._wait_s)}
        if not members:
            raise ReplicaUnavailableError(f"no replica is ready (waited {self._wait_s:g} s)")
        decision, candidates = self._decide(request, tokens, list(members.values()))
        for ranked in decision.ranked:
            attempt = self._reserve(members[ranked.replica], candidates[ranked.replica], request, tokens)
            stream = None
            try:
                stream = await attempt.member.client.submit(request)
                first = await anext(stream)
            except (OverloadedError, ServerError) as error:
                decision.refusals.append(error)
                continue
            else:
                self._chosen(decision, ranked, first)
                async with aclosing(self._relay(attempt, first, stream)) as deltas:
                    async for delta in deltas:
                        yield delta
                return
            finally:
                if stream is not None:
                    stream.close()
                self._in_flight.release(attempt.reservation)
        raise _refused(decision.refusals)

    def replicas(self) -> list[ReplicaStatus]:
        """Every known replica."""
        return self._membership.replicas()

    def routing(self) -> RoutingStats:
        """What was decided since start."""
        return RoutingStats(
            decisions=dict(self._reasons),
            predicted_hit_tokens=self._predicted,
            actual_hit_tokens=self._actual,
            best_hit_tokens=self._best,
        )

    def _decide(
        self, request: GenerateRequest, tokens: bytes, members: list[Member]
    ) -> tuple[Decision, dict[ReplicaId, Candidate]]:
        began = self._clock()
        num_tokens = len(request.prompt_token_ids) + len(request.output_token_ids)
        candidates = self._view.candidates(tokens, request.cache_salt, members)
        ranked = self._policy.choose(RoutingRequest(request.request_id, num_tokens), candidates)
        cached = {candidate.replica: candidate.cached_tokens for candidate in candidates}
        decision = Decision(request.request_id, num_tokens, ranked, cached, self._clock() - began)
        self.decisions.append(decision)
        return decision, {candidate.replica: candidate for candidate in candidates}

    def _reserve(self, member: Member, candidate: Candidate, request: GenerateRequest, tokens: bytes) -> _Attempt:
        uncached = max(1, len(request.prompt_token_ids) + len(request.output_token_ids) - candidate.cached_tokens)
        prefix = prefix_of(member.info, tokens, request.cache_salt)
        idle = candidate.occupancy == 0
        seconds = uncached / candidate.prefill_tokens_per_s
        return _Attempt(member, self._in_flight.reserve(candidate.replica, prefix, uncached, seconds), idle)

    def _chosen(self, decision: Decision, ranked: Ranked, first: TokenDelta) -> None:
        decision.chosen = ranked
        decision.predicted_tokens = decision.cached[ranked.replica]
        decision.actual_tokens = first.cached_tokens
        reason = "refused" if decision.refusals else ranked.reason
        self._reasons[self._policy.name, reason] += 1
        self._predicted += decision.predicted_tokens
        self._actual += first.cached_tokens or 0
        self._best += max(decision.cached.values())

    async def _relay(
        self, attempt: _Attempt, first: TokenDelta, stream: ReplicaStream
    ) -> AsyncGenerator[TokenDelta, None]:
        self._learn_prefill(attempt, first)
        yield replace(first, replica=attempt.member.info.replica)
        if first.finish_reason is not None:
            return
        async for delta in stream:
            attempt.num_tokens += len(delta.token_ids)
            if delta.finish_reason is not None:
                self._learn_decode(attempt)
            yield delta

    def _learn_prefill(self, attempt: _Attempt, first: TokenDelta) -> None:
        attempt.first_at = self._clock()
        reservation = attempt.reservation
        self._in_flight.first_token(reservation)
        if attempt.idle and first.cached_tokens is not None:
            num_tokens = len(reservation.prefix.tokens) // TOKEN_BYTES
            attempt.member.rates.observe_prefill(num_tokens - first.cached_tokens, attempt.first_at - reservation.began)

    def _learn_decode(self, attempt: _Attempt) -> None:
        if attempt.num_tokens >= MIN_DECODE_SAMPLE:
            seconds = (self._clock() - attempt.first_at) / attempt.num_tokens
            attempt.member.rates.observe_decode(seconds, attempt.member.load.kv_usage)


def _pack(request: GenerateRequest) -> bytes:
    try:
        return pack_tokens(request.prompt_token_ids) + pack_tokens(request.output_token_ids)
    except (OverflowError, TypeError) as error:
        raise InvalidRequestError(f"the prompt has a value that is no token id: {error}", param="prompt") from error


def _refused(refusals: list[WarmrootError]) -> WarmrootError:
    """One error for all: busy if any was merely busy, for then a later try may succeed."""
    waits = [error.retry_after for error in refusals if isinstance(error, OverloadedError)]
    if waits:
        return OverloadedError("every replica's queue is full", retry_after=min(waits))
    return refusals[-1] if refusals else ReplicaUnavailableError("no replica could be chosen")
