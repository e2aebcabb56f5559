"""Engines that step together: one for each group of ranks whose attention is data-parallel.

Each group has requests, KV blocks and a prefix cache of its own. Its ranks hold a part of the experts that all groups'
tokens go to, so a step is run by all groups at once, also by those that have nothing to compute.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import zip_longest
from typing import Protocol, runtime_checkable

from ...cluster.engine_counts import EngineCounts, together
from ...cluster.errors import EngineError, InvalidRequestError
from ...cluster.ids import BlockHash, RequestId
from ...cluster.messages import GenerateRequest, Load, TokenDelta
from ...kv_store.block_pool import InvariantError
from ...kv_store.events import BlocksStored, KvEvent
from ...kv_store.hashing import pack_tokens, salted
from .config import EngineConfig
from .engine import Engine
from .event_union import EventUnion
from .executor import Executor
from .plan import StepPlan, StepResult

SEQUENCE_TOKENS = 64
"""A sequence weighs as much as so many tokens that are still to be computed: what it will decode is not known."""


@runtime_checkable
class GroupedExecutor(Executor, Protocol):
    """Runs one plan for each of its groups in a step. A result has the sequences of all of them."""

    @property
    def num_groups(self) -> int:
        """Groups with KV blocks of their own, ``num_blocks`` each."""
        ...

    def submit_all(self, plans: Sequence[StepPlan]) -> None:
        """Start a step: the plan of each group, all with the step's number, empty where there is nothing to do."""
        ...


def start_engines(
    executor: Executor,
    config: EngineConfig,
    clock: Callable[[], float],
    namespace: BlockHash,
    weights_version: str = "",
) -> "Engine | JointEngine":
    """What serves requests with all groups of an executor, for a ``LocalEngine``. The limits are each group's.

    An executor that is no ``GroupedExecutor`` is one group.
    """
    if isinstance(executor, GroupedExecutor) and executor.num_groups > 1:
        return JointEngine(executor, config, clock, namespace, weights_version)
    return Engine(executor, config, clock, namespace, weights_version=weights_version)


class JointEngine:
    """An ``Engine`` for each group behind what looks like one. Not thread-safe."""

    def __init__(
        self,
        executor: GroupedExecutor,
        config: EngineConfig,
        clock: Callable[[], float],
        namespace: BlockHash,
        weights_version: str = "",
    ) -> None:
        """As ``Engine``."""
        self.config = config
        self.namespace = namespace
        self._executor = executor
        self._lanes = [_Lane(executor) for _ in range(executor.num_groups)]
        self.engines = [Engine(lane, config, clock, namespace, weights_version=weights_version) for lane in self._lanes]
        self.max_tokens = self.engines[0].max_tokens
        """Prompt and output tokens that one sequence can have here."""
        self._union = EventUnion(executor.num_groups)
        self._owed: list[dict[RequestId, int]] = [{} for _ in self.engines]
        """By group, tokens that requests without a first token wanted computed when they came."""
        self._in_flight: deque[tuple[int, list[tuple[Engine, int]], str]] = deque()
        """Steps, the engines that take part in them with the number that each of them gave it, and what is adopted."""
        self._adopts = ""
        self._num_steps = 0
        self._failure: str | None = None

    @property
    def has_work(self) -> bool:
        """Whether ``step`` has anything to do."""
        return bool(self._adopts or self._in_flight) or any(engine.has_work for engine in self.engines)

    @property
    def num_begun(self) -> int:
        """See ``Engine``."""
        return sum(engine.num_begun for engine in self.engines)

    @property
    def weights_version(self) -> str:
        """See ``Engine``."""
        return self.engines[0].weights_version

    @property
    def num_in_flight(self) -> int:
        """Steps submitted whose results have not been taken."""
        return len(self._in_flight)

    def add(self, source: GenerateRequest) -> None:
        """Queue a request where it will be done with first. Raises what ``Engine.add`` raises."""
        self._check_alive()
        if any(source.request_id in engine for engine in self.engines):
            raise InvalidRequestError(f"request {source.request_id} is running already", param="request_id")
        missing = self._missing_tokens(source)
        group = min(range(len(self.engines)), key=lambda group: self._cost(group, missing[group]))
        self.engines[group].add(source)
        if source.request_id in self.engines[group]:  # it had not ended elsewhere
            self._owed[group][source.request_id] = missing[group]

    def _missing_tokens(self, source: GenerateRequest) -> list[int]:
        """By group, tokens of a request that are not cached there."""
        tokens = source.prompt_token_ids + source.output_token_ids
        try:
            packed = pack_tokens(tokens)
        except (OverflowError, TypeError):  # the engine that gets it will say so
            return [0] * len(self.engines)
        root = salted(self.namespace, source.cache_salt)
        return [len(tokens) - engine.cache.match(root, packed, len(tokens)).num_tokens for engine in self.engines]

    def _cost(self, group: int, missing: int) -> tuple[bool, int]:
        """What a request has before it and brings, in tokens; groups that would refuse it come last."""
        scheduler = self.engines[group].scheduler
        sequences = len(scheduler.running) + len(scheduler.waiting)
        most = self.config.max_num_queued_tokens
        is_full = len(scheduler.waiting) >= self.config.max_num_queued_reqs or (
            most is not None and len(scheduler.waiting) > 0 and scheduler.waiting.num_tokens + min(missing, most) > most
        )
        return is_full, missing + sum(self._owed[group].values()) + SEQUENCE_TOKENS * sequences

    def abort(self, request_id: RequestId) -> None:
        """See ``Engine``."""
        for engine in self.engines:
            engine.abort(request_id)
        self._settle(request_id)

    def step(self) -> list[TokenDelta]:
        """Schedule, run and account one step. Raises EngineError after a failure has been reported by deltas."""
        self._check_alive()
        try:
            return self.end(self._executor.result()) if self.begin_all() else self.take_pending()
        except Exception as error:  # whatever the executor meets, its requests must end
            return self.fail(f"{type(error).__name__}: {error}")

    def begin(self) -> bool:
        """Schedule the next step of all groups and submit it. False: nothing to run now."""
        self._check_alive()
        if self._adopts:
            self._begin_adopting()
            return True
        # A step takes as long as its longest part: nobody's prefill may hold up the decodes of another group.
        decodes = any(engine.scheduler.has_decodes for engine in self.engines)
        begun = [
            (engine, lane.take())
            for engine, lane in zip(self.engines, self._lanes, strict=True)
            if engine.begin(beside_decodes=decodes)
        ]
        if not begun:
            return False
        self._num_steps += 1
        plans = dict(begun)
        empty = StepPlan(step=self._num_steps)
        self._in_flight.append((self._num_steps, [(engine, plan.step) for engine, plan in begun], ""))
        self._executor.submit_all([replace(plans.get(engine, empty), step=self._num_steps) for engine in self.engines])
        return True

    def _begin_adopting(self) -> None:
        self._num_steps += 1
        adopts, self._adopts = self._adopts, ""
        self._in_flight.append((self._num_steps, [], adopts))
        self._executor.submit_all([StepPlan(step=self._num_steps, adopts=adopts)] * len(self.engines))

    def begin_all(self) -> bool:
        """Submit as many steps as the executor makes use of. False: none is in flight."""
        while len(self._in_flight) < self._executor.max_in_flight and self.begin():
            pass
        return bool(self._in_flight)

    def end(self, result: StepResult) -> list[TokenDelta]:
        """Account the oldest step in flight."""
        step, begun, adopts = self._in_flight[0]
        if result.error is not None:
            return self.fail(result.error)
        if result.step != step:
            return self.fail(f"the result of step {result.step} came for step {step}")
        self._in_flight.popleft()
        for engine in self.engines if adopts else ():
            engine.weights_version = adopts
        deltas = self.take_pending()
        for engine, number in begun:
            deltas += engine.end(replace(result, step=number))
        for delta in deltas:
            self._settle(delta.request_id)
        return deltas

    def _settle(self, request_id: RequestId) -> None:
        for owed in self._owed:
            owed.pop(request_id, None)

    def fail(self, message: str) -> list[TokenDelta]:
        """See ``Engine``."""
        self._failure = message
        self._in_flight.clear()
        return [delta for engine in self.engines for delta in engine.fail(message)]

    def take_pending(self) -> list[TokenDelta]:
        """Deltas of requests that ended without a step."""
        deltas = [delta for engine in self.engines for delta in engine.take_pending()]
        for delta in deltas:
            self._settle(delta.request_id)
        return deltas

    def remaining(self) -> dict[RequestId, int]:
        """See ``Engine``."""
        return {request_id: tokens for engine in self.engines for request_id, tokens in engine.remaining().items()}

    def load(self) -> Load:
        """Of all groups together."""
        loads = [engine.load() for engine in self.engines]
        return Load(
            running=sum(load.running for load in loads),
            waiting=sum(load.waiting for load in loads),
            waiting_tokens=sum(load.waiting_tokens for load in loads),
            kv_used_blocks=sum(load.kv_used_blocks for load in loads),
            kv_total_blocks=sum(load.kv_total_blocks for load in loads),
            max_num_seqs=sum(load.max_num_seqs for load in loads),
            num_drafts=sum(load.num_drafts for load in loads),
            num_draft_tokens=sum(load.num_draft_tokens for load in loads),
            accepted_by_place=tuple(map(sum, zip_longest(*(load.accepted_by_place for load in loads), fillvalue=0))),
        )

    def counts(self) -> EngineCounts:
        """Of all groups together."""
        return together([engine.counts() for engine in self.engines])

    def clear_cache(self) -> None:
        """Forget all cached prefixes. Running requests go on, uncached."""
        for engine in self.engines:
            engine.clear_cache()

    def hold(self, held: bool) -> None:
        """See ``Engine``."""
        for engine in self.engines:
            engine.hold(held)

    def abort_begun(self) -> None:
        """See ``Engine``."""
        for engine in self.engines:
            engine.abort_begun()

    def adopt(self, version: str, namespace: BlockHash) -> None:
        """See ``Engine``."""
        self.namespace = namespace
        for engine in self.engines:
            engine.move_on(namespace)
        self._adopts = version

    def drain_events(self) -> list[KvEvent]:
        """What has entered the first cache and left the last one since the last call."""
        return [
            event
            for group, engine in enumerate(self.engines)
            for event in self._union.merge(group, engine.drain_events())
        ]

    def snapshot_events(self) -> list[BlocksStored]:
        """All that is cached in any group, no block before its parent. Drain the events before."""
        union = EventUnion(len(self.engines))
        return [
            event
            for group, engine in enumerate(self.engines)
            for event in union.merge(group, engine.snapshot_events())
            if isinstance(event, BlocksStored)
        ]

    def _check_alive(self) -> None:
        if self._failure is not None:
            raise EngineError(self._failure)


class _Lane:
    """The executor as one group's engine sees it: keeps a plan until those of the others are made."""

    def __init__(self, executor: Executor) -> None:
        self.layout = executor.layout
        self.num_blocks = executor.num_blocks
        self.max_in_flight = executor.max_in_flight
        self.chains = executor.chains
        self._plan: StepPlan | None = None

    def submit(self, plan: StepPlan) -> None:
        """Keep it."""
        self._plan = plan

    def take(self) -> StepPlan:
        """What was submitted last."""
        plan, self._plan = self._plan, None
        if plan is None:
            raise InvariantError("an engine began a step without a plan")
        return plan

    def result(self) -> StepResult:
        """Raises InvariantError: results come to all groups at once."""
        raise InvariantError("a group has no results of its own")

    def shutdown(self) -> None:
        """Nothing is held."""
