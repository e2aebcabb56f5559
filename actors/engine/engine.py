"""One replica's engine: requests in, token deltas out, one step at a time.

``step`` does it all. A caller with a thread or an event loop uses the halves: ``begin`` schedules and submits, ``end``
takes the oldest result, and requests may be added and aborted in between.
"""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from ...cluster.drain_rate import DrainRate
from ...cluster.engine_counts import EngineCounts
from ...cluster.errors import EngineError, InvalidRequestError, OverloadedError
from ...cluster.ids import BlockHash, RequestId
from ...cluster.messages import FinishReason, GenerateRequest, Load, TokenDelta
from ...kv_store.events import BlocksStored, KvEvent
from ...kv_store.hashing import salted
from ...kv_store.prefix_cache import PrefixCache
from .config import EngineConfig
from .counters import Counters, load_of
from .deadlines import Deadlines
from .deltas import last_delta, report, too_late, without_token
from .draft_length import StepShape
from .draft_tree import NO_DRAFT
from .entry import check_request, excess_tokens
from .executor import Executor
from .plan import SequenceResult, StepPlan, StepResult
from .request import Request, Status
from .scheduler import Scheduler
from .speculation import Speculator
from .throughput import Throughput

MIN_RETRY_S = 0.1
UNKNOWN_RETRY_S = 1.0
"""Before anything was measured."""


class Engine:
    """Schedules requests onto an executor. Not thread-safe: call it from one thread or event loop."""

    def __init__(
        self,
        executor: Executor,
        config: EngineConfig,
        clock: Callable[[], float],
        namespace: BlockHash,
        wall: Callable[[], float] = time.time,
        weights_version: str = "",
    ) -> None:
        """``clock`` gives seconds, monotonic; ``namespace`` is the root of the block hashes without a tenant's salt;
        ``wall`` is the clock of deadlines. ``weights_version``: what deltas are said to come from.
        """
        self.config = config
        self.namespace = namespace
        self.weights_version = weights_version
        """Of the weights that the latest result came from."""
        self.cache = PrefixCache(
            executor.layout,
            executor.num_blocks,
            enabled=config.enable_prefix_caching,
            min_partial=None if config.share_partial_blocks else 0,
        )
        num_parts = 1 if executor.chains else executor.max_in_flight
        self.speculator = None if config.speculation is None else Speculator(config.speculation)
        self.scheduler = Scheduler(
            self.cache, config, chains=executor.chains, num_parts=num_parts, speculator=self.speculator
        )
        self.max_tokens = min(config.max_model_len, self.cache.max_tokens())
        """Prompt and output tokens that one sequence can have here."""
        self._executor = executor
        self._clock = clock
        self._wall = wall
        self._throughput = Throughput()
        self._drain = DrainRate()
        self._deadlines = Deadlines()
        self._requests: dict[RequestId, Request] = {}
        self._in_flight: deque[_Submitted] = deque()
        self._pending: list[TokenDelta] = []
        self._last_end = float("-inf")
        self._num_added = 0
        self._num_steps = 0
        self._counters = Counters()
        self._failure: str | None = None
        self._adopts = ""

    @property
    def has_work(self) -> bool:
        """Whether ``step`` has anything to do."""
        return bool(self._requests or self._pending or self._adopts or self._in_flight)

    @property
    def num_begun(self) -> int:
        """Requests for which something has been computed, waiting ones that were preempted among them."""
        return sum(request.has_begun for request in self._requests.values() if request.status is not Status.FINISHED)

    def __contains__(self, request_id: RequestId) -> bool:
        """Whether a request waits, runs, or is still in flight after its end."""
        return request_id in self._requests

    @property
    def num_in_flight(self) -> int:
        """Plans submitted whose results have not been taken."""
        return len(self._in_flight)

    def add(self, source: GenerateRequest) -> None:
        """Queue a request.

        Raises ContextTooLongError, InvalidRequestError or OverloadedError if it is refused, EngineError if the
        engine has failed.
        """
        self._check_alive()
        if source.request_id in self._requests:
            raise InvalidRequestError(f"request {source.request_id} is running already", param="request_id")
        check_request(source, self.config.vocab_size, self.max_tokens)
        now = self._clock()
        order = (now - source.age + source.priority * self.config.priority_age_s, self._num_added + 1)
        try:
            request = Request(source, salted(self.namespace, source.cache_salt), self.max_tokens, order)
        except (OverflowError, TypeError) as error:
            raise InvalidRequestError(f"prompt has a token id that is no int32: {error}", param="prompt") from error
        end = request.end(self.config.eos_token_ids) if source.output_token_ids else None
        if end is not None:  # an earlier replica was lost between the last token and its finish reason
            self._pending.append(last_delta(request, *end))
            return
        if not source.age:
            self._check_room(request)
        self._num_added += 1
        request.queued_at = now
        self._requests[request.id] = request
        self.scheduler.add(request, source.share)
        if source.deadline:
            request.deadline = source.deadline - self._wall() + now
            self._deadlines.put(request.deadline, request.id)

    def _check_room(self, request: Request) -> None:
        """Raise OverloadedError when what waits is too much, by number or by tokens; one request always may."""
        waiting = self.scheduler.waiting
        excess = excess_tokens(request, waiting, self.config)
        if excess > 0:
            wait_s = self._wait_s(excess)
            waits = f"{len(waiting)} requests are waiting already, with {waiting.num_tokens} tokens"
            raise OverloadedError(f"{waits}: try again in {wait_s:.2f} s", retry_after=wait_s)

    def _wait_s(self, tokens: float) -> float:
        """Seconds until so many tokens have left the queue."""
        guess = self._throughput.per_s or self.config.prefill_tokens_per_s or tokens / UNKNOWN_RETRY_S
        return max(MIN_RETRY_S, tokens / self._drain.per_s(guess, self._clock()))

    def abort(self, request_id: RequestId) -> None:
        """Forget a request and free all it holds; no delta follows. Unknown and ended ones are ignored."""
        request = self._requests.get(request_id)
        if request is not None:
            self.scheduler.remove([request])
            if not len(self.scheduler.waiting):
                self._drain.end(self._clock())
            if not request.num_in_flight:  # else its id and its pages stay taken until the step is done
                del self._requests[request_id]

    def step(self) -> list[TokenDelta]:
        """Schedule, run and account one step. Raises EngineError after a failure has been reported by deltas."""
        self._check_alive()
        try:
            return self.end(self._executor.result()) if self.begin_all() else self.take_pending()
        except Exception as error:  # whatever the executor meets, its requests must end
            return self.fail(f"{type(error).__name__}: {error}")

    def begin(self, *, beside_decodes: bool = False) -> bool:
        """Schedule the next step and submit it. False: nothing to run now. May be called again before ``end``.

        ``beside_decodes``: see ``Scheduler.schedule``.
        """
        self._check_alive()
        if self._deadlines:
            self._expire()
        if self._adopts:
            self._begin_adopting()
            return True
        scheduled = self._schedule(beside_decodes)
        if scheduled is None:
            return False
        self._num_steps += 1
        plan, chunks = scheduled
        shape = None if self.speculator is None else self.speculator.shape(plan)
        now = self._clock()
        for sequence in plan.new:
            request = self._requests[sequence.request_id]
            request.started_at = request.started_at or now
        self._in_flight.append(_Submitted(plan.step, now, chunks, shape))
        self._executor.submit(plan)
        return True

    def _begin_adopting(self) -> None:
        """A step for nothing else: all ranks change between the steps before and after it."""
        self._num_steps += 1
        adopts, self._adopts = self._adopts, ""
        self._in_flight.append(_Submitted(self._num_steps, self._clock(), {}, None, adopts))
        self._executor.submit(StepPlan(step=self._num_steps, adopts=adopts))

    def _schedule(self, beside_decodes: bool) -> tuple[StepPlan, dict[Request, int]] | None:
        """The next plan; what it takes from the waiting ones is measured."""
        waiting = self.scheduler.waiting
        if not len(waiting):
            return self.scheduler.schedule(self._num_steps + 1, beside_decodes=beside_decodes)
        before, now = waiting.num_tokens, self._clock()
        self._drain.begin(now)
        scheduled = self.scheduler.schedule(self._num_steps + 1, beside_decodes=beside_decodes)
        self._drain.drained(max(0, before - waiting.num_tokens), now)
        if not len(waiting):
            self._drain.end(now)
        return scheduled

    def _expire(self) -> None:
        """End requests whose deadline has passed, wherever they are, and free what they hold."""
        now = self._clock()
        for request_id in self._deadlines.passed(now, self._requests):
            request = self._requests[request_id]
            if request.status is not Status.FINISHED and request.deadline <= now:
                self._pending.append(last_delta(request, FinishReason.DEADLINE, None, too_late(request)))
                self.abort(request_id)

    def begin_all(self) -> bool:
        """Submit as many steps as the executor makes use of. False: none is in flight."""
        while len(self._in_flight) < self._executor.max_in_flight and self.begin():
            pass
        return bool(self._in_flight)

    def end(self, result: StepResult) -> list[TokenDelta]:
        """Account the oldest step in flight."""
        submitted = self._in_flight[0]
        step, chunks = submitted.step, submitted.chunks
        if result.error is not None:
            return self.fail(result.error)
        if result.step != step:
            return self.fail(f"the result of step {result.step} came for step {step}")
        self._in_flight.popleft()
        if submitted.adopts:
            self.weights_version = submitted.adopts
            return self.take_pending()
        now = self._clock()
        seconds, self._last_end = now - max(submitted.began, self._last_end), now
        num_step_tokens = sum(chunks.values())
        self._throughput.record(num_step_tokens, seconds)
        self._counters.stepped(num_step_tokens, seconds)
        if self.speculator is not None:
            self.speculator.stepped(submitted.shape, seconds)
        answers = {answer.request_id: answer for answer in result.sequences}
        deltas = self.take_pending()
        for request, num_tokens in chunks.items():
            if request.status is Status.FINISHED:
                self.scheduler.landed(request)
                if not request.num_in_flight:
                    del self._requests[request.id]
                continue
            answer = answers.get(request.id)
            if answer is not None and answer.prompt_logprobs and request.prompt_logprobs is not None:
                request.prompt_logprobs += answer.prompt_logprobs
            num_known = num_tokens - len(request.drafted)
            if request.num_computed + num_known == len(request.tokens):
                deltas.append(self._receive(request, num_known, answer, now))
            else:
                self.scheduler.computed(request, num_known)
        return deltas

    def _append(self, request: Request, num_known: int, sampled: list[int]) -> tuple[FinishReason, int | None] | None:
        """Account the ``num_known`` last tokens and those sampled after them; why the sequence is over, if it is."""
        end, before = None, len(request.tokens)
        for token_id in sampled:
            request.tokens.append(token_id)
            end = request.end(self.config.eos_token_ids)
            if end is not None:
                break
        drafted, request.drafted = request.drafted, NO_DRAFT
        num_accepted = max(0, len(sampled) - 1)
        if self.speculator is not None and drafted:
            self.speculator.verified(request, drafted, sampled)
        # All that was sampled, but for the last one, was drafted and has been computed.
        self.scheduler.computed(request, num_known + min(num_accepted, len(request.tokens) - before))
        return end

    def _receive(self, request: Request, num_known: int, answer: SequenceResult | None, now: float) -> TokenDelta:
        """Append what was sampled, and end the request if that ends it."""
        index, error = request.num_output, None
        end = self._append(request, num_known, answer.token_ids if answer is not None else [])
        request.draft = NO_DRAFT if answer is None else answer.draft
        if self.speculator is not None and request.num_asked:
            self.speculator.drafted(request)
        num_new = request.num_output - index
        self._counters.num_generated += num_new
        if not num_new:
            end = request.end(self.config.eos_token_ids)
            if end is None:
                end, error = without_token(answer)
        if not request.num_in_flight:
            request.num_expected = len(request.tokens)
        if end is not None:
            self.scheduler.remove([request])
            if not request.num_in_flight:
                del self._requests[request.id]
        first = not request.reported
        version = None if request.told_version == self.weights_version else self.weights_version
        request.told_version = self.weights_version
        logprobs = answer.logprobs if answer is not None else None
        prompt_logprobs, request.prompt_logprobs = request.prompt_logprobs, None
        return TokenDelta(
            request_id=request.id,
            index=index,
            token_ids=request.tokens[len(request.tokens) - num_new :].tolist(),
            logprobs=logprobs[:num_new] if logprobs is not None else None,
            prompt_logprobs=prompt_logprobs,
            cached_tokens=request.cached_tokens if first else None,
            weights_version=version or None,
            finish_reason=end[0] if end is not None else None,
            stop_reason=end[1] if end is not None else None,
            error=error,
            report=report(request, now) if first else None,
            embedding=None if answer is None else answer.embedding,
        )

    def fail(self, message: str) -> list[TokenDelta]:
        """The executor is lost: every request ends as one that can go on elsewhere. Nothing can be added any more."""
        self._failure = message
        self._in_flight.clear()
        deltas = self.take_pending()
        for request in self._requests.values():
            if request.status is not Status.FINISHED:
                deltas.append(last_delta(request, FinishReason.LOST, None, message))
            request.num_in_flight = 0
        self.scheduler.remove(self._requests.values())
        self._requests.clear()
        return deltas

    def take_pending(self) -> list[TokenDelta]:
        """Deltas of requests that ended without a step."""
        deltas, self._pending = self._pending, []
        return deltas

    def remaining(self) -> dict[RequestId, int]:
        """Tokens that each running request may still generate."""
        return {request.id: request.max_tokens - len(request.tokens) for request in self.scheduler.running}

    def load(self) -> Load:
        """What the router needs to know."""
        counts = None if self.speculator is None else self.speculator.counts
        return load_of(self.scheduler, counts, self.config.max_num_seqs)

    def counts(self) -> EngineCounts:
        """What was done since the start."""
        return self._counters.counts(self.scheduler, self.cache)

    def clear_cache(self) -> None:
        """Forget all cached prefixes. Running requests go on, uncached."""
        self.cache.clear()

    def hold(self, held: bool) -> None:
        """Whether requests that have not begun must wait; the others go on."""
        self.scheduler.waiting.held = held

    def abort_begun(self) -> None:
        """End all that has begun; what it has got is told to have been aborted."""
        for request in [request for request in self._requests.values() if request.has_begun]:
            if request.status is not Status.FINISHED:
                self._pending.append(last_delta(request, FinishReason.ABORT))
                self.abort(request.id)

    def adopt(self, version: str, namespace: BlockHash) -> None:
        """Compute with the weights that the executor has prepared as ``version``, from the next step on.

        What comes of it is told by ``weights_version``, once that step is done.
        """
        self.move_on(namespace)
        self._adopts = version

    def move_on(self, namespace: BlockHash) -> None:
        """Nothing that is cached now is used again. Running requests go on with what they have, uncached."""
        self.namespace = namespace
        self.clear_cache()
        for request in self._requests.values():
            request.namespace = salted(namespace, request.cache_salt)

    def drain_events(self) -> list[KvEvent]:
        """What has entered and left the cache since the last call."""
        return self.cache.drain_events()

    def snapshot_events(self) -> list[BlocksStored]:
        """All that is cached, warmest first. Drain the events before."""
        return self.cache.snapshot_events()

    def _check_alive(self) -> None:
        if self._failure is not None:
            raise EngineError(self._failure)


@dataclass(frozen=True, slots=True)
class _Submitted:
    step: int
    began: float
    chunks: dict[Request, int]
    shape: StepShape | None
    adopts: str = ""
