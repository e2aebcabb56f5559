"""A model without weights that catches every mistake in block tables.

``ScriptedExecutor`` stores in each page slot which prefix (as a hash of all tokens up to there) was written for which
KV group, checks on every step that each token sees exactly its own history, and samples the next token as a fixed
function of the whole prefix. So whatever is cached, copied, evicted, preempted, chunked or drafted, the output is
known.
"""

from collections import deque
from dataclasses import dataclass, field

from manual_clock import ManualClock

from warmroot.actors.engine.config import EngineConfig
from warmroot.actors.engine.draft_tree import ROOT, Draft
from warmroot.actors.engine.engine import Engine
from warmroot.actors.engine.plan import NewSequence, SequenceResult, SequenceStep, StepPlan, StepResult
from warmroot.cluster.ids import NULL_BLOCK, BlockHash, RequestId
from warmroot.cluster.kv_layout import KvLayout
from warmroot.cluster.messages import GenerateRequest, TokenDelta, TokenLogprob
from warmroot.cluster.sampling_params import SamplingParams
from warmroot.kv_store.events import BlocksRemoved, BlocksStored, CacheCleared
from warmroot.kv_store.hashing import TOKEN_BYTES, block_hash, namespace_root

NAMESPACE = namespace_root("scripted")


def extend(prefix: int, token_id: int) -> int:
    return (prefix * 6364136223846793005 + token_id + 1442695040888963407) % 2**64


def prefixes(token_ids: list[int]) -> list[int]:
    """Hash of every prefix, the whole sequence last."""
    hashes, prefix = [], 0
    for token_id in token_ids:
        prefix = extend(prefix, token_id)
        hashes.append(prefix)
    return hashes


def next_token(prefix: int, vocab_size: int) -> int:
    return (prefix >> 33) % vocab_size


def expected_output(prompt: list[int], num_tokens: int, vocab_size: int) -> list[int]:
    prefix, output = prefixes(prompt)[-1], []
    for _ in range(num_tokens):
        output.append(next_token(prefix, vocab_size))
        prefix = extend(prefix, output[-1])
    return output


@dataclass
class Sequence:
    new: NewSequence
    tokens: list[int]
    tables: list[list[int]]
    num_computed: int
    prefixes: list[int]
    block_size: int
    branches: list[int] = field(default_factory=list)
    """Prefix of each node of the tree that is being verified."""

    def prefix_at(self, cell: int) -> int:
        """Of the token, or of the node behind the last one, that is stored there."""
        return self.prefixes[cell] if cell < len(self.tokens) else self.branches[cell - len(self.tokens)]

    def plant(self, draft: Draft) -> None:
        """A tree behind the last token; a chain is appended."""
        self.branches = []
        for token_id, parent in zip(draft.token_ids, draft.parents, strict=False):
            self.branches.append(extend(self.prefixes[-1] if parent == ROOT else self.branches[parent], token_id))
        if not draft.parents:
            for token_id in draft.token_ids:
                self.append(token_id)

    def append(self, token_id: int) -> None:
        self.tokens.append(token_id)
        self.prefixes.append(extend(self.prefixes[-1], token_id))

    def cut(self, length: int) -> None:
        del self.tokens[length:], self.prefixes[length:]

    @property
    def room(self) -> int:
        """Tokens that have pages, beyond those there are."""
        return len(self.tables[0]) * self.block_size - len(self.tokens)


@dataclass
class ScriptedExecutor:
    layout: KvLayout
    num_blocks: int
    vocab_size: int = 3
    fail_at: int | None = None
    max_in_flight: int = 1
    chains: bool = False
    trees: bool = False
    """Guesses come as trees, as by Medusa's heads, which write no pages."""
    plans: list[StepPlan] = field(default_factory=list)
    results: deque = field(default_factory=deque)
    sequences: dict[RequestId, Sequence] = field(default_factory=dict)
    pages: dict[int, list] = field(default_factory=dict)

    def submit(self, plan: StepPlan) -> None:
        assert plan.step == len(self.plans) + 1
        self.plans.append(plan)
        if plan.step == self.fail_at:
            self.results.append(StepResult(step=plan.step, error="scripted failure"))
            return
        for request_id in plan.finished:
            del self.sequences[request_id]
        for new in plan.new:
            self._start(new)
        self._copy(plan)
        assert len({step.request_id for step in plan.sequences}) == len(plan.sequences)
        written: set[tuple[int, int]] = set()
        for step in plan.sequences:
            self.sequences[step.request_id].plant(step.draft)
            self._write(step, written)
        for step in plan.sequences:
            self._read(step)
        self.results.append(StepResult(step=plan.step, sequences=[self._answer(step) for step in plan.sequences]))

    def result(self) -> StepResult:
        return self.results.popleft()

    def shutdown(self) -> None:
        self.sequences.clear()

    def _start(self, new: NewSequence) -> None:
        assert new.request_id not in self.sequences
        tokens, tables = list(new.token_ids), [list(table) for table in new.block_tables]
        assert 0 < new.num_prompt_tokens <= len(tokens)
        self.sequences[new.request_id] = Sequence(
            new, tokens, tables, new.num_computed, prefixes(tokens), self.layout.block_size
        )

    def _copy(self, plan: StepPlan) -> None:
        sources = {source for source, _ in plan.copies}
        assert not sources & {destination for _, destination in plan.copies}
        for source, destination in plan.copies:
            assert NULL_BLOCK not in (source, destination)
            self.pages[destination] = list(self.pages[source])

    def _write(self, step: SequenceStep, written: set[tuple[int, int]]) -> None:
        sequence, size = self.sequences[step.request_id], self.layout.block_size
        assert step.num_computed == sequence.num_computed and step.num_tokens > 0
        for table, blocks in zip(sequence.tables, step.new_blocks, strict=True):
            table.extend(blocks)
        for group, table in enumerate(sequence.tables):
            for position in range(step.num_computed, step.num_computed + step.num_tokens):
                page, slot = table[position // size], position % size
                assert 0 < page < self.num_blocks, "a token is written to no page"
                assert (page, slot) not in written, "two tokens are written to one slot"
                written.add((page, slot))
                self.pages.setdefault(page, [None] * size)[slot] = (group, sequence.prefix_at(position))

    def _read(self, step: SequenceStep) -> None:
        sequence, size = self.sequences[step.request_id], self.layout.block_size
        end = step.num_computed + step.num_tokens
        assert end <= len(sequence.tokens) + len(sequence.branches)
        for group, table in enumerate(sequence.tables):
            window = self.layout.groups[group].window
            first = 0 if window is None else max(0, step.num_computed - window + 1)
            for position in range(first, end):
                content = self.pages.get(table[position // size], [None] * size)[position % size]
                assert content == (group, sequence.prefix_at(position)), f"{step.request_id} sees a wrong history"
        sequence.num_computed = end

    def _answer(self, step: SequenceStep) -> SequenceResult:
        sequence = self.sequences[step.request_id]
        logprobs = None
        if sequence.new.params.prompt_logprobs is not None:
            ahead = range(step.num_computed + 1, step.num_computed + step.num_tokens + 1)
            logprobs = [
                TokenLogprob(sequence.tokens[position], -float(position), 1)
                for position in ahead
                if position < sequence.new.num_prompt_tokens
            ]
        sampled: list[int] = []
        if step.samples:
            assert sequence.num_computed == len(sequence.tokens) + len(sequence.branches)
            sampled = (self._verify_tree if step.draft.parents else self._verify)(sequence, step.draft)
        else:
            assert not step.draft and not step.num_drafts
        return SequenceResult(
            request_id=step.request_id,
            token_ids=sampled,
            prompt_logprobs=logprobs,
            draft=(self._guess_tree if self.trees else self._guess)(sequence, step.num_drafts),
        )

    def _verify_tree(self, sequence: Sequence, draft: Draft) -> list[int]:
        """Nodes that stand move behind the last token, whatever lies there."""
        chosen = [next_token(prefix, self.vocab_size) for prefix in (sequence.prefixes[-1], *sequence.branches)]
        nodes = draft.standing(chosen)
        known, size = len(sequence.tokens), sequence.block_size
        for table in sequence.tables:
            for place, node in enumerate(nodes):
                (page, slot), (source, at) = (divmod(known + offset, size) for offset in (place, node))
                self.pages[table[page]][slot] = self.pages[table[source]][at]
        sampled = [chosen[node + 1] for node in (ROOT, *nodes)]
        sequence.branches = []
        for token_id in sampled:
            sequence.append(token_id)
        sequence.num_computed = len(sequence.tokens) - 1
        return sampled

    def _guess_tree(self, sequence: Sequence, count: int) -> Draft:
        """Two guesses at each node, of which now and then neither is right."""
        token_ids, prefixes = list[int](), [sequence.prefixes[-1]]
        parents = tuple(node // 2 - 1 for node in range(count))
        for node, parent in enumerate(parents):
            prefix = prefixes[parent + 1]
            wrong = (prefix % 3 == 0) + node % 2
            token_ids.append((next_token(prefix, self.vocab_size) + wrong) % self.vocab_size)
            prefixes.append(extend(prefix, token_ids[-1]))
        return Draft(tuple(token_ids), parents)

    def _verify(self, sequence: Sequence, draft: Draft) -> list[int]:
        known = len(sequence.tokens) - len(draft)
        sampled: list[int] = []
        for place, draft_id in enumerate((*draft.token_ids, None)):
            sampled.append(next_token(sequence.prefixes[known + place - 1], self.vocab_size))
            if sampled[-1] != draft_id:
                break
        sequence.cut(known)
        for token_id in sampled:
            sequence.append(token_id)
        sequence.num_computed = len(sequence.tokens) - 1
        return sampled

    def _guess(self, sequence: Sequence, count: int) -> Draft:
        """What comes next, with an error now and then. Drafting writes pages, like any pass."""
        length, room = len(sequence.tokens), sequence.room
        for _ in range(min(count, room + 1)):
            position = len(sequence.tokens) - 1
            for group, table in enumerate(sequence.tables):
                page = table[position // self.layout.block_size]
                assert 0 < page < self.num_blocks
                self.pages.setdefault(page, [None] * self.layout.block_size)[position % self.layout.block_size] = (
                    group,
                    "drafted",
                )
            wrong = sequence.prefixes[-1] % 4 == 0
            sequence.append((next_token(sequence.prefixes[-1], self.vocab_size) + wrong) % self.vocab_size)
        draft = Draft(tuple(sequence.tokens[length:]))
        sequence.cut(length)
        return draft


class Harness:
    """An engine on a scripted executor, its clock, and everything it has said."""

    def __init__(
        self,
        *,
        num_blocks: int = 64,
        windows: tuple[int | None, ...] = (None,),
        block_size: int = 4,
        vocab_size: int = 3,
        fail_at: int | None = None,
        max_in_flight: int = 1,
        chains: bool = False,
        config: EngineConfig | None = None,
        **options,
    ) -> None:
        options = {"max_model_len": 256, "max_num_seqs": 8, "max_num_batched_tokens": 32} | options
        self.clock = ManualClock()
        layout = KvLayout.of(windows, block_size)
        settings = config or EngineConfig(**options)
        trees = settings.speculation is not None and settings.speculation.method == "medusa"
        self.executor = ScriptedExecutor(layout, num_blocks, vocab_size, fail_at, max_in_flight, chains, trees)
        self.engine = Engine(self.executor, settings, self.clock, NAMESPACE)
        self.deltas: dict[str, list[TokenDelta]] = {}
        self.known: dict[BlockHash, tuple[BlockHash, bytes]] = {}
        """Events replayed: block hash to (parent, tokens)."""
        self.cleared = False

    def clear(self) -> None:
        self.engine.clear_cache()
        self.cleared = True

    def add(self, request_id: str, prompt: list[int], *, output=(), priority=0, salt="", **params) -> GenerateRequest:
        request = GenerateRequest(
            request_id=RequestId(request_id),
            prompt_token_ids=prompt,
            params=SamplingParams(**params),
            output_token_ids=list(output),
            priority=priority,
            cache_salt=salt,
        )
        self.engine.add(request)
        return request

    def step(self) -> list[TokenDelta]:
        self.clock.now += 1.0
        return self.record(self.engine.step())

    def record(self, deltas: list[TokenDelta]) -> list[TokenDelta]:
        for delta in deltas:
            self.deltas.setdefault(delta.request_id, []).append(delta)
        return deltas

    def run(self, max_steps: int = 10_000) -> None:
        for _ in range(max_steps):
            if not self.engine.has_work:
                return
            self.step()
        raise AssertionError(f"still busy after {max_steps} steps")

    def output(self, request_id: str) -> list[int]:
        """Tokens of all deltas, whose indexes must be without a gap."""
        tokens: list[int] = []
        first = self.deltas[request_id][0].index
        for delta in self.deltas[request_id]:
            assert delta.index == first + len(tokens)
            tokens += delta.token_ids
        return tokens

    def finish(self, request_id: str):
        *before, last = self.deltas[request_id]
        assert all(delta.finish_reason is None for delta in before)
        return last.finish_reason

    def check(self) -> None:
        """The invariants that hold between steps."""
        nodes = self.check_engine(self.engine, self.executor)
        self.replay()
        assert set(self.known) == nodes

    def check_engine(self, engine: Engine, executor: ScriptedExecutor) -> set[BlockHash]:
        """Those of one engine; what it has cached."""
        cache = engine.cache
        leases = [request.lease for request in engine.scheduler.running]
        held = [block for lease in leases for table in lease.tables for block in table if block != NULL_BLOCK]
        held += [source for lease in leases for source, _ in lease.copies]
        nodes = list(cache.tree.nodes())
        cache.pool.check(held, [page for node in nodes for page in node.pages if page != NULL_BLOCK])
        for lease in leases:
            assert lease.cursor is None or lease.cursor.alive or self.cleared, "a cursor's block was evicted"
        pins = [lease.cursor for lease in leases] + [lease.copy_node for lease in leases]
        for node in nodes:
            assert node.alive and node.pins == sum(1 for pin in pins if pin is node)
            assert node.parent is not None and node.hash == block_hash(node.parent.hash, node.tokens)
        for request in engine.scheduler.waiting:
            assert request.lease is None and request.num_computed == 0
            assert request.overtaken <= engine.config.max_overtakes
        plan = executor.plans[-1] if executor.plans else StepPlan(step=0)
        assert plan.num_tokens <= engine.config.max_num_batched_tokens
        assert len(plan.sequences) <= engine.config.max_num_seqs >= len(engine.scheduler.running)
        return {node.hash for node in nodes}

    def replay(self) -> None:
        for event in self.engine.drain_events():
            match event:
                case BlocksStored(parent, hashes, token_ids):
                    self._store(parent, hashes, token_ids)
                case BlocksRemoved(hashes):
                    for block in hashes:
                        del self.known[block]
                        assert all(parent != block for parent, _ in self.known.values()), "parent removed before child"
                case CacheCleared():
                    self.known.clear()

    def _store(self, parent: BlockHash, hashes: tuple[BlockHash, ...], token_ids: bytes) -> None:
        step = TOKEN_BYTES * self.executor.layout.block_size
        assert len(token_ids) == step * len(hashes)
        for index, block in enumerate(hashes):
            tokens = token_ids[index * step : (index + 1) * step]
            assert block not in self.known and block == block_hash(parent, tokens)
            self.known[block] = (parent, tokens)
            parent = block
