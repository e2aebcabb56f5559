"""The executor of one process: plans in, tokens out, on a decoder with its KV memory."""

import logging
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import replace

import numpy as np
import torch

from ...cluster.errors import EngineError
from ...cluster.ids import RequestId
from ...cluster.kv_layout import KvLayout
from ...cluster.messages import TokenLogprob
from ..attention.flash_backend import FlashAttention
from ..attention.interface import AttentionMetadata
from ..attention.kv_memory import KvMemory, KvType
from ..engine.draft_tree import NO_DRAFT
from ..engine.plan import SequenceResult, StepPlan, StepResult
from ..models.decoder import Decoder
from .accepted_path import settle
from .batch import Batch, apply_diff, only_decodes, pack
from .choice import choice_for
from .cuda_graphs import CudaRecorder, DecodeGraphs, graph_sizes
from .decode import DecodeBatch, EagerDecodes
from .drafting import Drafts, HiddenReader
from .guides import Guides
from .logprobs import logprobs
from .next_weights import NextWeights
from .pooling import pooled
from .rows import SamplingRow
from .sampler import Sampled, Sampler
from .sequences import SequenceState, SequenceTable
from .verify import VerifyingChoice, drafted_rows

_LOGPROB_ROWS = 256
"""Prompt positions whose logits are held at a time: a chunk's would take gigabytes."""

Forward = Callable[[torch.Tensor, torch.Tensor, KvMemory, tuple[AttentionMetadata, ...]], torch.Tensor | None]
"""As ``Decoder.forward``; None where a later stage goes on."""

logger = logging.getLogger(__name__)


class ModelRunner:
    """Runs a plan when its result is asked for. Implements ``Executor``.

    A rank of a gang runs its part; only one that gets logits has results and appends what it samples.
    """

    max_in_flight = 1
    chains = True

    def __init__(
        self,
        decoder: Decoder,
        layout: KvLayout,
        num_blocks: int,
        *,
        kv_dtype: KvType | None = None,
        eos_token_ids: tuple[int, ...] | None = None,
        max_num_seqs: int = 256,
        forward: Forward | None = None,
        make_drafter: Callable[[KvMemory], Drafts] | None = None,
        acceptance_threshold: float | None = None,
        guides: Guides | None = None,
    ) -> None:
        """``num_blocks`` counts the null page. ``kv_dtype`` defaults to the decoder's, the end tokens to its spec's.

        Steps of up to ``max_num_seqs`` decodes are recorded where the device can do that. ``forward`` is that of a
        pipeline stage around the decoder, and ``layout`` that of the stage's layers. ``make_drafter`` gets the KV
        pages; ``acceptance_threshold`` is that of a ``VerifyingChoice``. Only with ``guides`` do outputs keep to
        grammars.
        """
        spec = decoder.spec
        self.decoder = decoder
        self.layout = layout
        self.num_blocks = num_blocks
        self.kv_dtype: KvType = kv_dtype or decoder.dtype
        self.eos_token_ids = spec.eos_token_ids if eos_token_ids is None else eos_token_ids
        self._stage = forward
        self._kv = KvMemory.allocate(
            layout, num_blocks, spec.cache_heads, spec.cache_dim, self.kv_dtype, decoder.device, decoder.backend
        )
        choice = choice_for(decoder.device)
        self._sampler = Sampler(self.eos_token_ids, choice)
        self._verifying = VerifyingChoice(choice, acceptance_threshold)
        self._drafter = None if make_drafter is None else make_drafter(self._kv)
        self._guides = guides
        self._sequences = SequenceTable(len(layout.groups))
        self._max_num_seqs = max_num_seqs
        self._decodes = self._make_decodes()
        self._next_weights: NextWeights | None = None
        self._after_adopting: Callable[[], None] = lambda: None
        self._plans: deque[StepPlan] = deque()

    def _make_decodes(self) -> EagerDecodes | DecodeGraphs:
        decoder, eager = self.decoder, EagerDecodes(self._logits, self._decode_batch)
        # What reads lengths or counts on the host (torch's attention, quantised KV, experts), or hops, no recording can
        # repeat.
        can_record = isinstance(decoder.backend, FlashAttention) and isinstance(self.kv_dtype, torch.dtype)
        reads_hidden = isinstance(self._drafter, HiddenReader)
        records = can_record and self._stage is None and decoder.spec.moe is None and not reads_hidden
        return self._graphs(eager, self._max_num_seqs) if records else eager

    def submit(self, plan: StepPlan) -> None:
        """Queue a step."""
        self._plans.append(plan)

    def result(self) -> StepResult:
        """Run the oldest step. An exception becomes its ``error``."""
        plan = self._plans.popleft()
        try:
            return StepResult(step=plan.step, sequences=self._run(plan))
        except Exception as error:  # the engine ends its requests and reports the message
            logger.exception("step %d failed", plan.step)
            return StepResult(step=plan.step, error=" ".join(f"{type(error).__name__}: {error}".split()))

    def shutdown(self) -> None:
        """Forget all sequences and plans."""
        self._plans.clear()
        self._sequences = SequenceTable(len(self.layout.groups))

    def renew_with(self, next_weights: NextWeights, after: Callable[[], None] = lambda: None) -> None:
        """Where plans find weights that they adopt; ``after`` is called when it is done."""
        self._next_weights, self._after_adopting = next_weights, after

    def _adopt(self, version: str) -> None:
        if self._next_weights is None:
            raise EngineError("this model takes no other weights")
        self._next_weights.adopt(version)
        self._decodes = self._make_decodes()  # recordings have the old weights
        self._after_adopting()

    def learn(self, sampled: Iterable[tuple[RequestId, list[int]]]) -> None:
        """Before the next plan: what another rank has sampled."""
        sampled = list(sampled)
        known = [(state, ids) for request_id, ids in sampled if (state := self._sequences.get(request_id)) is not None]
        self._settle((state, state.draft.path(token_ids)) for state, token_ids in known)
        self._sequences.learn(sampled)

    def _settle(self, accepted: Iterable[tuple[SequenceState, list[int]]]) -> None:
        settle(accepted, self._sequences, self._kv, self.decoder.backend)

    @torch.inference_mode()
    def _run(self, plan: StepPlan) -> list[SequenceResult]:
        if plan.adopts:
            self._adopt(plan.adopts)
        apply_diff(self._sequences, plan)
        self._kv.copy_blocks(plan.copies)
        if self._guides is not None:
            self._guides.begin(self._sequences, plan)
        if self._drafter is not None:
            self._drafter.begin(self._sequences, plan)
        if not plan.sequences:
            return []
        results = self._decode(plan) if only_decodes(plan) else self._mixed(plan)
        if self._guides is not None:
            results = self._guides.follow(results)
        return results if self._drafter is None else self._with_drafts(plan, results, self._drafter)

    def _with_drafts(self, plan: StepPlan, results: list[SequenceResult], drafter: Drafts) -> list[SequenceResult]:
        drafts = drafter.draft(self._sequences, plan)
        if not drafts:
            return results
        return [replace(result, draft=drafts.get(result.request_id, NO_DRAFT)) for result in results]

    def _decode(self, plan: StepPlan) -> list[SequenceResult]:
        """Every sequence computes one token and samples the next."""
        states = [self._sequences[step.request_id] for step in plan.sequences]
        computed = [step.num_computed for step in plan.sequences]
        logits = self._decodes.logits(self._sequences, states, computed)
        if logits is None:
            return []
        sampled = self._sample(states, logits)
        return [
            SequenceResult(
                request_id=state.request_id, token_ids=[token_id], logprobs=None if entry is None else [entry]
            )
            for state, token_id, entry in zip(states, sampled.token_ids, sampled.logprobs, strict=True)
        ]

    def _run_layers(
        self, token_ids: torch.Tensor, positions: torch.Tensor, metadata: tuple[AttentionMetadata, ...]
    ) -> torch.Tensor | None:
        forward = self._stage or self.decoder.forward
        return forward(token_ids, positions, self._kv, metadata)

    def _logits(self, batch: DecodeBatch, max_seqlen_k: int) -> torch.Tensor | None:
        metadata = batch.metadata(max_seqlen_k)
        hidden = self._run_layers(batch.token_ids, batch.positions, metadata)
        if hidden is None:
            return None
        if isinstance(self._drafter, HiddenReader):
            self._drafter.read(hidden)
        return self.decoder.logits(hidden)

    def _decode_batch(self, size: int) -> DecodeBatch:
        return DecodeBatch(size, len(self.layout.groups), self.layout.block_size, self.decoder.device)

    def _graph_batch(self, size: int) -> DecodeBatch:
        block_size = self.layout.block_size
        num_blocks = -(-self.decoder.spec.max_position // block_size)
        return DecodeBatch(size, len(self.layout.groups), block_size, self.decoder.device, num_blocks)

    def _graphs(self, eager: EagerDecodes, max_num_seqs: int) -> DecodeGraphs:
        return DecodeGraphs(self._logits, self._graph_batch, graph_sizes(max_num_seqs), CudaRecorder(), eager)

    def _mixed(self, plan: StepPlan) -> list[SequenceResult]:
        batch = pack(self._sequences, plan, self.layout.block_size)
        hidden = self._run_layers(self._tensor(batch.token_ids), self._tensor(batch.positions), self._metadata(batch))
        if hidden is None:
            return []
        prompt, vectors = self._prompt_logprobs(batch, hidden), pooled(batch, hidden)
        states, sampled = batch.sampled, dict[RequestId, Sampled]()
        if states:
            hidden = hidden[self._tensor(batch.sampled_rows)]
            logits = self.decoder.logits(hidden)
            if logits is None:
                return []
            if batch.verifies:
                runs, rows = self._verify(batch, logits)
                hidden = hidden[self._tensor(np.array(rows))]
            else:
                runs = _single(self._sample(states, logits))
            if isinstance(self._drafter, HiddenReader):
                self._drafter.read(hidden)
            sampled = dict(zip((state.request_id for state in states), runs, strict=True))
        ids = [state.request_id for state in batch.states]
        return [
            _result(state, sampled.get(request_id), prompt.get(request_id), vectors.get(request_id))
            for state, request_id in zip(batch.states, ids, strict=True)
        ]

    def _metadata(self, batch: Batch) -> tuple[AttentionMetadata, ...]:
        cu_seqlens_q, seqused_k = self._tensor(batch.cu_seqlens_q), self._tensor(batch.seqused_k)
        max_seqlen_q, max_seqlen_k = batch.max_seqlen_q, batch.max_seqlen_k
        tree_mask = None if batch.tree_mask is None else self._tensor(batch.tree_mask)
        return tuple(
            AttentionMetadata(
                cu_seqlens_q,
                seqused_k,
                self._tensor(group.block_table),
                self._tensor(group.slot_mapping),
                max_seqlen_q,
                max_seqlen_k,
                tree_mask,
            )
            for group in batch.groups
        )

    def _sample(self, states: list[SequenceState], logits: torch.Tensor) -> Sampled:
        """One token for each sequence from its row of logits, appended to it."""
        if all(state.is_plain for state in states):
            sampled = self._sampler.greedy(logits)
        else:
            history = self._sequences.history
            rows = [
                SamplingRow(state.params, state.seed, state.num_prompt, history(state), state.guide) for state in states
            ]
            sampled = self._sampler.sample(logits, rows)
        self._sequences.append(states, sampled.token_ids)
        return sampled

    def _verify(self, batch: Batch, logits: torch.Tensor) -> tuple[list[Sampled], list[int]]:
        """For each sequence the tokens that stand and one more, appended to it, and the row of logits of the last."""
        verified, history = batch.verified, self._sequences.history
        if all(state.is_plain for state, _ in verified):
            sampled = self._sampler.greedy(logits)
        else:
            rows = [row for state, draft in verified for row in drafted_rows(state, draft, history)]
            sampled = self._sampler.sample(logits, rows, self._verifying)
        accepted: list[tuple[SequenceState, list[int]]] = []
        runs: list[Sampled] = []
        last_rows: list[int] = []
        start = 0
        for state, draft in verified:
            nodes = draft.standing(sampled.token_ids[start : start + len(draft) + 1])
            stands = [start, *(start + 1 + node for node in nodes)]
            accepted.append((state, nodes))
            runs.append(Sampled([sampled.token_ids[row] for row in stands], [sampled.logprobs[row] for row in stands]))
            last_rows.append(stands[-1])
            start += len(draft) + 1
        self._settle(accepted)
        for (state, _), run in zip(accepted, runs, strict=True):
            self._sequences.extend_by(state, run.token_ids)
            state.draft_weights = None
        return runs, last_rows

    def _prompt_logprobs(self, batch: Batch, hidden: torch.Tensor) -> dict[RequestId, list[TokenLogprob]]:
        found: dict[RequestId, list[TokenLogprob]] = {}
        for index, state in enumerate(batch.states):
            if state.wants_prompt_logprobs:
                start, end = batch.cu_seqlens_q[index : index + 2].tolist()
                found[state.request_id] = self._chunk_logprobs(state, int(batch.positions[start]), hidden[start:end])
        return found

    def _chunk_logprobs(self, state: SequenceState, first: int, hidden: torch.Tensor) -> list[TokenLogprob]:
        """Of the prompt tokens that follow the positions from ``first`` on."""
        following = self._sequences.history(state)[first + 1 : min(first + len(hidden) + 1, state.num_prompt)]
        token_ids = self._tensor(following.astype(np.int64))
        num_top = [state.params.prompt_logprobs or 0] * _LOGPROB_ROWS
        entries: list[TokenLogprob] = []
        for start in range(0, len(following), _LOGPROB_ROWS):
            targets = token_ids[start : start + _LOGPROB_ROWS]
            logits = self.decoder.logits(hidden[start : start + len(targets)])
            if logits is not None:
                entries += logprobs(logits, targets, num_top[: len(targets)])
        return entries

    def _tensor(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(self.decoder.device, non_blocking=True)


def _single(sampled: Sampled) -> list[Sampled]:
    return [Sampled([token_id], [entry]) for token_id, entry in zip(*sampled, strict=True)]


def _result(
    state: SequenceState,
    sampled: Sampled | None,
    prompt_logprobs: list[TokenLogprob] | None,
    embedding: bytes | None,
) -> SequenceResult:
    if sampled is None:
        return SequenceResult(
            request_id=state.request_id, token_ids=[], prompt_logprobs=prompt_logprobs, embedding=embedding
        )
    entries = [entry for entry in sampled.logprobs if entry is not None]
    return SequenceResult(
        request_id=state.request_id,
        token_ids=sampled.token_ids,
        logprobs=entries or None,
        prompt_logprobs=prompt_logprobs,
    )
