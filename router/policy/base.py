"""What a routing policy is given and what it answers.

Replicas are columns of numbers, not objects: a choice among a thousand of them is a few passes over arrays.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from math import inf
from random import Random
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from ...cluster.ids import BlockHash, ReplicaId, RequestId
from ...cluster.messages import WeightsIdentity

Numbers = NDArray[np.float64]
Places = NDArray[np.intp]


@dataclass(frozen=True, slots=True)
class RoutingRequest:
    """What decides where a request goes. ``session`` is a stickiness key; empty: none."""

    request_id: RequestId
    prompt_tokens: int
    session: str = ""
    tokens: bytes = b""
    """The prompt as ``hashing.pack_tokens`` makes it; empty where it is not known."""
    salt: str = ""
    """The tenant's."""
    max_output: float = inf
    """Tokens that it generates at most."""
    priority: int = 0
    """Lower goes first."""
    tenant: str = ""
    share: float = 1.0
    """Weight of the tenant among others."""
    deadline: float = inf
    """By the router's clock."""
    admitted: bool = False
    """It may wait whatever the queue: it belongs to a request that was let in."""
    company_tokens: int = 0
    """Prompt tokens of those that will be let in with it."""
    avoid: frozenset[ReplicaId] = frozenset()
    """It is not to go there as long as there are others."""
    weights: WeightsIdentity | None = None
    """It has begun on a replica with these: another one with them goes before all that have others."""

    @property
    def context_tokens(self) -> float:
        """Prompt and output at most; where the output is not bounded, its first token."""
        return self.prompt_tokens + (self.max_output if self.max_output < inf else 1)


class Prefix(NamedTuple):
    """A packed prompt (``hashing.pack_tokens``) in the namespace of a replica's cache."""

    namespace: BlockHash
    block_size: int
    tokens: bytes


class Column(IntEnum):
    """Rows of a ``Candidates`` table, one number for each replica."""

    RUNNING = 0
    """Requests that it computes, by its latest word."""
    WAITING = 1
    WAITING_TOKENS = 2
    """Uncomputed prompt tokens of all its requests."""
    KV_USAGE = 3
    """Share of KV memory held by running requests, 0..1."""
    MAX_NUM_SEQS = 4
    PREFILL_FIXED_S = 5
    """Seconds of a prefill that do not depend on its length."""
    PREFILL_TOKEN_S = 6
    DECODE_STEP_S = 7
    """One step with an empty KV cache."""
    KV_TOTAL_TOKENS = 8
    UNFINISHED = 9
    """Requests this router has there."""
    CONTEXT_TOKENS = 10
    """Their prompt tokens."""
    SENT_TOKENS = 11
    """Uncached tokens of those without a first token."""
    SENT_S = 12
    """Seconds these are expected to take."""
    HEAD_S = 13
    """Of these, the first one's."""
    HEAD_SINCE = 14
    """When the first one's prefill began."""
    MAX_MODEL_LEN = 15
    """Prompt and output tokens that one request can have there."""


class Candidates:
    """Replicas as the router sees them at the moment of the choice; valid until the router's next event.

    ``table`` has a row for each ``Column`` and a column for each of ``names``. ``cached_tokens`` are leading prompt
    tokens that a replica holds, or is about to compute for an earlier request. ``now`` is the clock of HEAD_SINCE.
    What is worked out from these is not to be written to.
    """

    def __init__(self, names: Sequence[ReplicaId], table: Numbers, cached_tokens: Numbers, now: float) -> None:
        self.names = names
        self.table = table
        self.cached_tokens = cached_tokens
        self.now = now

    def __len__(self) -> int:
        return len(self.names)

    @cached_property
    def occupancy(self) -> Numbers:
        """Requests there: the larger of what it said last and what this router knows."""
        table = self.table
        return np.maximum(table[Column.RUNNING] + table[Column.WAITING], table[Column.UNFINISHED])

    @property
    def sent_s(self) -> Numbers:
        """Prefill that this router has sent and that is not done: the estimates' sum less the time the head has had."""
        table = self.table
        served = np.minimum(self.now - table[Column.HEAD_SINCE], table[Column.HEAD_S])
        return np.maximum(0.0, table[Column.SENT_S] - served)

    @cached_property
    def backlog_s(self) -> Numbers:
        """Seconds until a replica has prefilled what it has: by this router's estimate or its own, the larger."""
        table = self.table
        return np.maximum(self.sent_s, table[Column.WAITING_TOKENS] * table[Column.PREFILL_TOKEN_S])

    def prefill_s(self, uncached: Numbers) -> Numbers:
        """Seconds to compute that many tokens on each."""
        return self.table[Column.PREFILL_FIXED_S] + uncached * self.table[Column.PREFILL_TOKEN_S]

    def uncached(self, prompt_tokens: int) -> Numbers:
        """Prompt tokens to compute on each. The last one always is: its logits give the first output."""
        return np.maximum(1.0, prompt_tokens - self.cached_tokens)


class Ranked(NamedTuple):
    """One candidate in the order of preference. ``cost`` has the policy's own unit; ``reason`` is one word."""

    replica: ReplicaId
    cost: float
    reason: str


class Ranking:
    """Candidates by cost, cheapest first, equals in random order. Most callers look at ``best`` only."""

    def __init__(
        self,
        names: Sequence[ReplicaId],
        costs: Numbers,
        reason: Callable[[int], str],
        rng: Random,
        equal: Places | None = None,
    ) -> None:
        """``reason`` gives the word for a place in ``names``.

        ``equal``: places of the best, where cost alone does not say.
        """
        self.costs = costs
        self.names = tuple(names)
        """All candidates, in their own order."""
        self._reason = reason
        self._rng = rng
        if equal is None:
            equal = np.flatnonzero(costs == costs.min()) if len(costs) else np.empty(0, dtype=np.intp)
        self._first = int(equal[rng.randrange(len(equal))] if len(equal) > 1 else equal[0]) if len(equal) else -1

    def __len__(self) -> int:
        return len(self.names)

    @property
    def place(self) -> int:
        """Place of the best in the candidates; -1 if there are none."""
        return self._first

    def dearer(self, places: NDArray[np.bool_], by: float) -> "Ranking":
        """The same with some costs raised."""
        return Ranking(self.names, self.costs + by * places, self._reason, self._rng)

    @property
    def best(self) -> Ranked:
        """The first choice. There must be one."""
        return self._ranked(self._first)

    def __iter__(self) -> Iterator[Ranked]:
        if self.names:
            yield self.best
        for place in np.argsort(self.costs, kind="stable").tolist():
            if place != self._first:
                yield self._ranked(place)

    def _ranked(self, place: int) -> Ranked:
        return Ranked(self.names[place], float(self.costs[place]), self._reason(place))


class Binding(Protocol):
    """When a request waits in the router, and who goes first."""

    @property
    def aging(self) -> float:
        """A second of waiting outweighs so much of ``work``."""
        ...

    @property
    def stall_s(self) -> float:
        """After so long without news of any request the first in line is bound whatever it waits for."""
        ...

    @property
    def tries(self) -> int:
        """Requests looked at, from the first in line, whenever a replica may have become free."""
        ...

    @property
    def in_turn(self) -> bool:
        """A request that comes also waits if one in line would go to the same replica."""
        ...

    def is_free(self, candidates: Candidates, place: int) -> bool:
        """Whether a request whose best candidate is at ``place`` need not wait."""
        ...

    def any_free(self, candidates: Candidates) -> bool:
        """Whether it is worth while to look at those who wait."""
        ...

    def work(self, candidates: Candidates, place: int, prompt_tokens: int) -> float:
        """The least goes first."""
        ...

    def after(self, waited_s: float, candidates: Candidates, ranking: Ranking, wanted: NDArray[np.bool_]) -> Ranking:
        """What a request chooses that has waited for so long. ``wanted`` are candidates that others in line prefer."""
        ...


class Policy(Protocol):
    """Orders candidates. Pure but for its own counters, random draws, and what it remembers of ``routed`` requests."""

    name: str
    binds_late: bool
    """Its costs are seconds that begin with ``Candidates.backlog_s``: requests may wait in the router."""

    def binding(self, late: Binding | None) -> Binding | None:
        """How its requests wait: ``late`` if it ``binds_late``, None if it binds at once."""
        ...

    def choose(self, request: RoutingRequest, candidates: Candidates) -> Ranking:
        """Every candidate once, best first; never raises."""
        ...

    def routed(self, request: RoutingRequest, replica: ReplicaId) -> None:
        """The request is on its way to that replica."""
        ...

    def first_token(self, request: RoutingRequest, replica: ReplicaId) -> None:
        """Its prefill is done."""
        ...

    def finished(self, request: RoutingRequest, replica: ReplicaId) -> None:
        """It ended there, well or not."""
        ...

    def left(self, replica: ReplicaId) -> None:
        """The replica takes no more requests."""
        ...


class Forgetful:
    """A policy that needs no memory of what it routed."""

    binds_late = False

    def binding(self, late: Binding | None) -> Binding | None:
        """See ``Policy``."""
        return late if self.binds_late else None

    def routed(self, request: RoutingRequest, replica: ReplicaId) -> None:
        """See ``Policy``."""

    def first_token(self, request: RoutingRequest, replica: ReplicaId) -> None:
        """See ``Policy``."""

    def finished(self, request: RoutingRequest, replica: ReplicaId) -> None:
        """See ``Policy``."""

    def left(self, replica: ReplicaId) -> None:
        """See ``Policy``."""
