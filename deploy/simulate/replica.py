"""A simulated replica: a vLLM-like engine core on a virtual clock.

Each step runs one token of every decoding sequence and up to ``max_num_batched_tokens`` prompt tokens; its duration
comes from ``ReplicaCosts``. Steps that only decode are computed many at a time, in closed form, up to the next end of a
sequence: exact, and as fast as the number of requests allows.
"""

import heapq
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ...cluster.messages import Load
from .block_cache import NO_PARENT, BlockCache
from .costs import ReplicaCosts
from .trace import TraceRequest


@dataclass(slots=True, eq=False)
class SimSequence:
    """A request in a replica."""

    trace: TraceRequest
    tag: Any
    """Whose it is."""
    prompt_tokens: int
    """To compute: after a preemption with what had been generated."""
    left: int
    """Tokens to generate."""
    expected: int = 0
    """Tokens of it that are counted as still to compute."""
    cached_tokens: int = -1
    """Of the prompt, when it was first admitted."""
    computed: int = 0
    held: int = 0
    """Blocks of the prompt that it holds."""
    generated: int = 0
    ends_at: int = 0
    """The decode step that gives its last token."""
    began_at: int = 0


class SimulatedReplica:
    """``schedule(delay, call)`` runs a call later on the virtual clock.

    ``on_first(sequence)`` and ``on_end(sequence)`` hear of first tokens and ends at the end of their step, ``on_load``
    of the replica's latest word.
    """

    def __init__(
        self,
        costs: ReplicaCosts,
        block_tokens: int,
        cache: BlockCache,
        now: Callable[[], float],
        schedule: Callable[[float, Callable[[], None]], None],
        on_first: Callable[[SimSequence], None],
        on_end: Callable[[SimSequence], None],
        on_load: Callable[[Load], None],
    ) -> None:
        self.cache = cache
        self._costs = costs
        self._block = block_tokens
        self._now = now
        self._schedule = schedule
        self._on_first = on_first
        self._on_end = on_end
        self._on_load = on_load
        self._waiting: deque[SimSequence] = deque()
        self._prefilling: list[SimSequence] = []
        self._decoding: list[tuple[int, int, SimSequence]] = []
        """A heap by the step of the last token."""
        self._to_compute = 0
        """Prompt tokens that are neither computed nor, as far as can be seen, cached."""
        self._generated = 0
        """Tokens that all that decode have generated."""
        self._prompts = 0
        """Prompt tokens of these, shared ones as often as they are read."""
        self._scheduled = 0
        """Blocks of prompt tokens in the step under way: they are taken, but nobody can share them yet."""
        self._step = 0
        """Decode steps done."""
        self._serial = 0
        self._turn = 0
        """Which wake-up is valid: others were cut short."""
        self._run: tuple[float, int, int, float, float] | None = None
        """Decode steps under way: start, how many, sequences, KV usage and its growth with each step."""
        self._busy = False
        self.alive = True

    @property
    def num_requests(self) -> int:
        """Requests here."""
        return len(self._waiting) + len(self._prefilling) + len(self._decoding)

    def submit(self, trace: TraceRequest, tag: object) -> None:
        """Take a request."""
        sequence = SimSequence(trace, tag, trace.input_tokens, trace.output_tokens)
        sequence.expected = trace.input_tokens - min(
            self.cache.leading(trace.block_ids) * self._block, trace.input_tokens - 1
        )
        self._to_compute += sequence.expected
        self._waiting.append(sequence)
        if not self._busy:
            self._begin()
            return
        self._on_load(self.load())
        self._cut_short()

    def kill(self) -> list[SimSequence]:
        """It is gone; what it had is returned."""
        self.alive = False
        self._turn += 1
        return [*self._waiting, *self._prefilling, *(sequence for _, _, sequence in self._decoding)]

    def load(self) -> Load:
        """What it says of itself."""
        return Load(
            running=len(self._prefilling) + len(self._decoding),
            waiting=len(self._waiting),
            waiting_tokens=self._to_compute,
            kv_used_blocks=min(self.cache.capacity, self.cache.active + self._scheduled),
            kv_total_blocks=self.cache.capacity,
            max_num_seqs=self._costs.max_num_seqs,
        )

    def _begin(self) -> None:
        """Start what can run now."""
        self._busy, self._run = True, None
        chunks = self._plan() if self._waiting or self._prefilling else []
        self._scheduled = sum(self._blocks(sequence, tokens) for sequence, tokens in chunks)
        sequences = len(self._decoding)
        usage = min(1.0, (self._prompts + self._generated) / (self.cache.capacity * self._block))
        if chunks:
            pairs = sum(tokens * sequence.computed for sequence, tokens in chunks)
            seconds = self._costs.prefill_s(sum(tokens for _, tokens in chunks))
            seconds += self._costs.prefill_context_s * pairs
            if sequences:
                seconds += self._costs.decodes_s(1, sequences, usage, 0.0)
            self._wake(seconds, lambda: self._end(chunks, min(1, sequences)))
        elif sequences:
            steps = self._decoding[0][0] - self._step
            growth = sequences / (self.cache.capacity * self._block)
            self._run = (self._now(), steps, sequences, usage, growth)
            self._wake(self._costs.decodes_s(steps, sequences, usage, growth), lambda: self._end([], steps))
        else:
            self._busy = False
        self._on_load(self.load())

    def _cut_short(self) -> None:
        """Somebody came: decode only to the end of the step under way."""
        if self._run is None:
            return
        began, steps, sequences, usage, growth = self._run
        low, high = 1, steps
        while low < high:
            middle = (low + high) // 2
            if began + self._costs.decodes_s(middle, sequences, usage, growth) <= self._now():
                low = middle + 1
            else:
                high = middle
        self._run = None
        if low < steps:
            at = began + self._costs.decodes_s(low, sequences, usage, growth)
            self._wake(max(0.0, at - self._now()), lambda: self._end([], low))

    def _wake(self, delay: float, call: Callable[[], None]) -> None:
        self._turn += 1
        turn = self._turn

        def wake() -> None:
            if turn == self._turn:
                call()

        self._schedule(delay, wake)

    def _plan(self) -> list[tuple[SimSequence, int]]:
        """Prompt tokens for the next step, admitting who fits."""
        budget = self._costs.max_num_batched_tokens - len(self._decoding)
        if self._decoding and self._costs.max_prefill_chunk is not None:
            budget = min(budget, self._costs.max_prefill_chunk)
        chunks: list[tuple[SimSequence, int]] = []
        for sequence in self._prefilling:
            if budget <= 0:
                return chunks
            budget -= self._chunk(sequence, budget, chunks)
        while budget > 0 and self._waiting:
            if len(self._prefilling) + len(self._decoding) >= self._costs.max_num_seqs:
                break
            if not self._admit(self._waiting[0]):
                break
            sequence = self._waiting.popleft()
            self._prefilling.append(sequence)
            budget -= self._chunk(sequence, budget, chunks)
        return chunks

    def _admit(self, sequence: SimSequence) -> bool:
        """Hold what is cached of its prompt, if the rest fits too."""
        ids = sequence.trace.block_ids
        if self.cache.missing(ids) > self.cache.available and self.num_requests > len(self._waiting):
            return False
        hits = self.cache.leading(ids)
        self.cache.hold(ids[:hits])
        sequence.held = hits
        sequence.computed = min(hits * self._block, sequence.trace.input_tokens - 1)
        self._expect(sequence, sequence.prompt_tokens - sequence.computed)
        if sequence.cached_tokens < 0:
            sequence.cached_tokens = sequence.computed
        self._serial += 1
        sequence.began_at = self._serial
        return True

    def _expect(self, sequence: SimSequence, tokens: int) -> None:
        self._to_compute += tokens - sequence.expected
        sequence.expected = tokens

    def _chunk(self, sequence: SimSequence, budget: int, chunks: list[tuple[SimSequence, int]]) -> int:
        tokens = min(budget, sequence.prompt_tokens - sequence.computed)
        chunks.append((sequence, tokens))
        return tokens

    def _end(self, chunks: Sequence[tuple[SimSequence, int]], steps: int) -> None:
        """A step, or a run of decode steps, is done."""
        self._decode(steps)
        for sequence, tokens in chunks:
            sequence.computed += tokens
            self._expect(sequence, sequence.expected - tokens)
            self._store(sequence)
            if sequence.computed == sequence.prompt_tokens:
                self._first_token(sequence)
        self._begin()

    def _decode(self, steps: int) -> None:
        if not steps:
            return
        self._step += steps
        self._generated += steps * len(self._decoding)
        while self._decoding and self._decoding[0][0] <= self._step:
            self._finish(heapq.heappop(self._decoding)[2])
        self._fit_generated()

    def _store(self, sequence: SimSequence) -> None:
        """Its blocks that are computed by now are cached."""
        ids, last = sequence.trace.block_ids, sequence.held + self._blocks(sequence, 0)
        if last > sequence.held:
            fresh = ids[sequence.held : last]
            while self.cache.missing(fresh) > self.cache.available and self._preempt(sequence):
                pass
            self.cache.store(ids[sequence.held - 1] if sequence.held else NO_PARENT, fresh)
            sequence.held = last

    def _blocks(self, sequence: SimSequence, tokens: int) -> int:
        """Prompt blocks, beyond those it holds, that are whole once ``tokens`` more are computed."""
        computed, length = sequence.computed + tokens, sequence.trace.input_tokens
        whole = len(sequence.trace.block_ids) if computed >= length else computed // self._block
        return max(0, whole - sequence.held)

    def _first_token(self, sequence: SimSequence) -> None:
        self._prefilling.remove(sequence)
        sequence.left -= 1
        if sequence.generated == 0:
            self._on_first(sequence)
        sequence.generated += 1
        if not sequence.left:
            self._leave(sequence)
            self._on_end(sequence)
            return
        sequence.ends_at = self._step + sequence.left
        self._generated += sequence.generated
        self._prompts += sequence.trace.input_tokens
        heapq.heappush(self._decoding, (sequence.ends_at, sequence.began_at, sequence))
        self._fit_generated()

    def _finish(self, sequence: SimSequence) -> None:
        self._generated -= sequence.generated + sequence.left
        self._prompts -= sequence.trace.input_tokens
        self._leave(sequence)
        self._on_end(sequence)

    def _leave(self, sequence: SimSequence) -> None:
        self.cache.release(sequence.trace.block_ids[: sequence.held])
        sequence.held = 0

    def _fit_generated(self) -> None:
        """Keep the room that generated tokens take; make others give way if there is none."""
        while True:
            wanted = -(-self._generated // self._block)
            if wanted <= self.cache.private:
                self.cache.private = wanted
                return
            if self.cache.take_private(wanted - self.cache.private) or not self._preempt(None):
                return

    def _preempt(self, spared: SimSequence | None) -> bool:
        """The latest to begin gives its blocks back and computes all of it again; False if it would be the last."""
        if len(self._decoding) < 2:
            return False
        victim = max((entry for entry in self._decoding if entry[2] is not spared), key=lambda entry: entry[1])
        self._decoding.remove(victim)
        heapq.heapify(self._decoding)
        sequence = victim[2]
        done = sequence.left - (sequence.ends_at - self._step)
        self._generated -= sequence.generated + done
        self._prompts -= sequence.trace.input_tokens
        sequence.generated += done
        sequence.left -= done
        sequence.prompt_tokens = sequence.trace.input_tokens + sequence.generated
        self._leave(sequence)
        self._expect(sequence, sequence.prompt_tokens)
        self._waiting.appendleft(sequence)
        return True
