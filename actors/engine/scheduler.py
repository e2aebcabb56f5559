"""Which tokens run in the next step.

There is no prefill phase and no decode phase: a request has tokens and computed tokens, and a step computes some of
those that are missing. Decodes (one token missing) go first, then running prefills, then new requests, within the
budget.

Several plans may be in flight. Ranks run them in order, so the chunks of a prompt can follow each other at once. With
``chains`` a decode follows the step that samples its token, on trust: a request that turns out to have ended keeps its
pages until that step has landed, and what it computed is ignored. Without, decodes are dealt out to as many plans as
may be in flight: one that took all of them would leave the others empty.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from ...cluster.ids import BlockId, RequestId
from ...kv_store.block_pool import InvariantError
from ...kv_store.prefix_cache import PrefixCache
from ...kv_store.radix import Match
from .config import EngineConfig
from .draft_tree import NO_DRAFT, Draft
from .plan import NewSequence, SequenceStep, StepPlan
from .request import Request, Status
from .speculation import Speculator
from .waiting_queue import Computing, WaitingQueue


@dataclass(slots=True)
class Work:
    """A step under construction: tokens for each request, and what is left of the budget."""

    budget: int
    chunks: dict[Request, int] = field(default_factory=dict[Request, int])
    drafts: dict[Request, Draft] = field(default_factory=dict[Request, Draft])
    """Their tokens count among a request's chunk."""
    preempted: bool = False


class Scheduler:
    """Running and waiting requests, and the pages they hold."""

    def __init__(
        self,
        cache: PrefixCache,
        config: EngineConfig,
        *,
        chains: bool = False,
        num_parts: int = 1,
        speculator: Speculator | None = None,
    ) -> None:
        """``num_parts`` plans share the decodes that are ready."""
        self.cache = cache
        self.running: list[Request] = []
        self.num_preemptions = 0
        """Since the start."""
        self._config = config
        self._chains = chains
        self._num_parts = num_parts
        self._speculator = speculator
        self._block_size = cache.layout.block_size
        self.waiting = WaitingQueue(cache.tree, self._block_size, config.max_overtakes, config.warm_candidates)
        self._dropped: list[RequestId] = []
        self._no_blocks: tuple[list[BlockId], ...] = tuple([] for _ in cache.layout.groups)
        self._windowed = any(group.window is not None for group in cache.layout.groups)

    def add(self, request: Request, share: float) -> None:
        """A new request waits. ``share``: see ``GenerateRequest``."""
        self.waiting.shares.enter(request.tenant, share)
        self.waiting.add(request)

    @property
    def has_decodes(self) -> bool:
        """Whether a sequence can compute the one token that it lacks."""
        return any(
            request.num_expected - request.num_scheduled == 1 and self._may_go_on(request) for request in self.running
        )

    def schedule(self, step: int, *, beside_decodes: bool = False) -> tuple[StepPlan, dict[Request, int]] | None:
        """The next plan and its requests with their numbers of tokens; None when nothing can run now.

        ``beside_decodes``: decodes elsewhere wait for this step, so prefills are bounded as if they were here.
        """
        work = Work(self._config.max_num_batched_tokens)
        prefills: list[Request] = []
        most_decodes = -(-len(self.running) // self._num_parts)
        # Preemption takes requests out of ``running`` meanwhile.
        for request in tuple(self.running):
            if request.status is not Status.RUNNING or not self._may_go_on(request):
                continue
            if request.num_expected - request.num_scheduled > 1:
                prefills.append(request)
            elif len(work.chunks) < most_decodes:
                self._advance(request, work)
        if self._speculator is not None:
            self._add_drafts(work, self._speculator)
        if (work.chunks or beside_decodes) and self._config.max_prefill_chunk is not None:
            work.budget = min(work.budget, self._config.max_prefill_chunk)
        for request in prefills:
            if work.budget and request.status is Status.RUNNING:
                self._advance(request, work)
        if not work.preempted:
            self._admit(work)
        return (self._plan(work, step), work.chunks) if work.chunks else None

    def _may_go_on(self, request: Request) -> bool:
        """Whether there are tokens to run beside what is in flight."""
        if not request.num_in_flight:
            return True
        if request.awaits_token:
            waits = bool(request.drafted) or (self._speculator is not None and self._speculator.waits_for(request))
            return self._chains and not waits and request.num_expected < request.max_tokens
        return request.num_scheduled < request.num_expected

    def _advance(self, request: Request, work: Work) -> None:
        """Run the request's missing tokens, as many as fit, preempting others if it has no page to run one."""
        lease, start = request.lease, request.num_scheduled
        if lease is None:
            raise InvariantError(f"running request {request.id} holds nothing")
        chunk = min(request.num_expected - start, work.budget)
        if self._windowed:
            self.cache.slide(lease, request.num_computed)  # later ones are not in the tree yet
        while not self.cache.grow(lease, start + chunk):
            to_boundary = self._block_size - start % self._block_size
            if chunk > to_boundary:
                chunk = to_boundary
                continue
            if request.num_in_flight:
                return
            victim = max((r for r in self.running if not r.num_in_flight), key=_importance)
            self._preempt(victim, work)
            if victim is request:
                return
        work.chunks[request] = chunk
        work.budget -= chunk

    def _add_drafts(self, work: Work, speculator: Speculator) -> None:
        """Let decodes verify drafted tokens, with half of the budget that is left: prefills must go on too."""
        decodes = [request for request in work.chunks if not request.num_in_flight]
        spare = (work.budget - len(self.running) + len(work.chunks)) // 2
        for request, draft in speculator.drafts(decodes, len(work.chunks)).items():
            length = len(request.tokens)
            wanted = min(len(draft), spare, request.max_tokens - length - 1)
            count = min(wanted, self._room_ahead(request, length + wanted) - length)
            if count > 0:
                work.drafts[request] = draft.first(count)
                work.chunks[request] += count
                work.budget -= count
                spare -= count

    def _room_ahead(self, request: Request, num_tokens: int) -> int:
        """Tokens that a request has pages for, after it has got those for ``num_tokens`` if there are any."""
        lease = request.lease
        if lease is None:
            raise InvariantError(f"running request {request.id} holds nothing")
        self.cache.grow(lease, num_tokens)
        return len(lease.tables[0]) * self._block_size

    def _asked(self, work: Work) -> dict[Request, int]:
        """Tokens that the ranks shall draft after the step for each request that samples in it."""
        if self._speculator is None:
            return {}
        sampling = [request for request in work.chunks if self._samples(request, work) and not request.num_in_flight]
        asked: dict[Request, int] = {}
        for request, wanted in self._speculator.lengths(sampling, len(sampling)).items():
            longest = len(request.tokens) + len(work.drafts.get(request, NO_DRAFT)) + 1
            count = min(wanted, request.max_tokens - len(request.tokens) - 2)
            if count > 0:
                # Less room does no harm: the ranks draft what they have pages for.
                self._room_ahead(request, min(longest + count - 1, request.max_tokens))
                asked[request] = count
        return asked

    def _samples(self, request: Request, work: Work) -> bool:
        end = request.num_scheduled + work.chunks[request] - len(work.drafts.get(request, NO_DRAFT))
        return end == request.num_expected and end < request.max_tokens

    def _preempt(self, request: Request, work: Work) -> None:
        """Give its pages back; it will be recomputed from what is cached then."""
        work.preempted = True
        self.num_preemptions += 1
        work.budget += work.chunks.pop(request, 0)
        work.drafts.pop(request, None)
        self.running.remove(request)
        self._let_go(request)
        request.requeue()
        self.waiting.add(request)

    def _admit(self, work: Work) -> None:
        """Start waiting requests while there are sequences, budget and pages for them."""
        if not len(self.waiting) or not work.budget or len(self.running) >= self._config.max_num_seqs:
            return
        computing: Computing = set()
        for request in self.running:
            self._note(request, computing)
        promised = sum(self._missing(request) for request in self.running)
        while work.budget and len(self.running) < self._config.max_num_seqs:
            request = self.waiting.choose(computing)
            if request is None or not self._start(request, work, promised):
                return
            self.waiting.started(request, computing)
            self.running.append(request)
            request.status = Status.RUNNING
            self._note(request, computing)
            promised += self._missing(request)

    def _missing(self, request: Request) -> int:
        """Pages a running request will want for what it has and one block more."""
        ahead = min(request.num_tokens + self._block_size, request.max_tokens)
        return self.cache.missing(request.lease, ahead) if request.lease else 0

    def _note(self, request: Request, computing: Computing) -> None:
        """Remember the block that a request is filling, if its tokens are all known."""
        cursor = request.lease.cursor if request.lease else None
        if cursor is not None and (cursor.depth + 1) * self._block_size <= len(request.tokens):
            computing.add((cursor, request.block_tokens(cursor.depth, self._block_size)))

    def _start(self, request: Request, work: Work, promised: int) -> bool:
        limit = request.num_tokens - 1 if request.reads_cache else 0  # the last token must run to give logits
        match = self.cache.match(request.namespace, request.packed, limit)
        if self._hold(request, match, work, promised):
            return True
        if self.running:
            return False
        # Alone it fits, unless what it matched and the source of its copy are in its way.
        if not self._hold(request, Match([], 0), work, 0):
            raise InvariantError(f"request {request.id} does not fit an idle engine")
        return True

    def _hold(self, request: Request, match: Match, work: Work, promised: int) -> bool:
        """Take pages for the request's first chunk, if all of its tokens fit beside what is promised to others."""
        if self.cache.least_needed(match, request.num_tokens) + promised > self.cache.num_available:
            return False
        lease = self.cache.acquire(request.namespace, match)
        if lease is None:
            return False
        computed = match.num_tokens + match.num_partial
        chunk = min(request.num_tokens - computed, work.budget)
        fits = self.cache.missing(lease, request.num_tokens) + promised <= self.cache.num_available
        if fits and not self.cache.grow(lease, computed + chunk):
            chunk = min(chunk, self._block_size - computed % self._block_size)
            fits = self.cache.grow(lease, computed + chunk)
        if not fits:
            self.cache.release(lease)
            return False
        request.lease = lease
        request.num_computed = request.num_scheduled = computed
        if request.cached_tokens is None:
            request.cached_tokens = computed
        work.chunks[request] = chunk
        work.budget -= chunk
        return True

    def _plan(self, work: Work, step: int) -> StepPlan:
        new: list[NewSequence] = []
        sequences: list[SequenceStep] = []
        copies: list[tuple[BlockId, BlockId]] = []
        asked = self._asked(work)
        for request, chunk in work.chunks.items():
            lease, blocks, sent = request.lease, self._no_blocks, request.num_sent_blocks
            if lease is None:
                raise InvariantError(f"scheduled request {request.id} holds nothing")
            request.num_sent_blocks = len(lease.tables[0])
            if not request.known:
                request.known = True
                copies += lease.copies
                new.append(_new_sequence(request, lease.tables))
            elif request.num_sent_blocks > sent:
                blocks = tuple(table[sent:] for table in lease.tables)
            draft, samples = work.drafts.get(request, NO_DRAFT), self._samples(request, work)
            start = request.num_scheduled
            request.num_in_flight += 1
            request.drafted = draft
            request.num_asked = asked.get(request, 0)
            request.num_scheduled += chunk - len(draft)
            request.num_expected += samples
            sequences.append(
                SequenceStep(
                    request_id=request.id,
                    num_computed=start,
                    num_tokens=chunk,
                    samples=samples,
                    new_blocks=blocks,
                    draft=draft,
                    num_drafts=request.num_asked,
                )
            )
        finished, self._dropped = tuple(self._dropped), []
        return StepPlan(
            step=step,
            finished=finished,
            new=tuple(new),
            sequences=tuple(sequences),
            copies=tuple(copies),
            least_probability=0.0 if self._speculator is None else self._speculator.least_probability,
        )

    def computed(self, request: Request, num_tokens: int) -> None:
        """A step has computed ``num_tokens`` of a request: its full blocks are cached from now on."""
        request.num_in_flight -= 1
        lease = request.lease
        if lease is None:
            raise InvariantError(f"request {request.id} was in flight and holds nothing")
        if lease.copies:
            self.cache.copied(lease)
        request.num_computed += num_tokens
        self.waiting.shares.charge(request.tenant, num_tokens)
        request.num_scheduled = max(request.num_scheduled, request.num_computed)
        self.cache.commit(lease, request.tokens, request.num_computed)

    def remove(self, requests: Iterable[Request]) -> None:
        """End requests and release all they hold. Idempotent; one in flight keeps its pages until it is ``landed``."""
        for request in requests:
            if request.status is Status.WAITING:
                self.waiting.remove(request)
            if request.status is not Status.FINISHED:
                self.waiting.shares.leave(request.tenant)
            request.status = Status.FINISHED
            if not request.num_in_flight and request.lease is not None:
                self.running.remove(request)
                self._let_go(request)

    def landed(self, request: Request) -> None:
        """A step of a request that was removed meanwhile is done."""
        request.num_in_flight -= 1
        self.remove([request])

    def _let_go(self, request: Request) -> None:
        if request.lease is not None:
            self.cache.release(request.lease)
            request.lease = None
        if request.known:
            self._dropped.append(request.id)
            request.known = False


def _importance(request: Request) -> tuple[int, tuple[float, int]]:
    """The largest is preempted first: least urgent, then latest."""
    return request.priority, request.order


def _new_sequence(request: Request, tables: tuple[list[BlockId], ...]) -> NewSequence:
    return NewSequence(
        request_id=request.id,
        token_ids=list(request.tokens),
        num_prompt_tokens=request.num_prompt,
        params=request.params,
        seed=request.seed,
        num_computed=request.num_computed,
        block_tables=tuple(list(table) for table in tables),
    )
