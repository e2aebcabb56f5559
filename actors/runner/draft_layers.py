"""Layers that draft: the model's own first ones over its own KV pages, or another model with pages beside them."""

import numpy as np
import torch

from ...cluster.errors import ConfigError
from ...cluster.ids import RequestId
from ...cluster.kv_layout import KvGroup, KvLayout
from ...cluster.model_spec import ModelSpec
from ..attention.interface import AttentionMetadata
from ..attention.kv_memory import KvMemory, KvType
from ..engine.plan import SequenceStep, StepPlan
from ..layers.moe import MoeMLP
from ..models.decoder import Decoder
from .batch import pack
from .decode import DecodeBatch, EagerDecodes
from .sequences import SequenceState, SequenceTable


class LayerSkip:
    """The first layers of the model, then its final norm and head (Zhang et al., "Draft & Verify", arXiv 2309.08168).

    What these layers cache is what the whole model caches for them, so there is nothing to catch up with.
    """

    def __init__(self, decoder: Decoder, kv: KvMemory, num_layers: int) -> None:
        """``decoder`` is the whole model, ``kv`` its pages."""
        self._whole = decoder
        self._num_layers = num_layers
        self._layers = decoder.layers
        self._short = decoder.first_layers(num_layers)
        self._kv = kv
        self._decodes = EagerDecodes(self._compute, self._batch)

    @property
    def _decoder(self) -> Decoder:
        """With the weights that the whole model has now."""
        if self._layers is not self._whole.layers:
            self._layers, self._short = self._whole.layers, self._whole.first_layers(self._num_layers)
        return self._short

    def begin(self, table: SequenceTable, plan: StepPlan) -> None:
        """See ``DraftLayers``."""

    def logits(self, table: SequenceTable, states: list[SequenceState], ahead: int) -> torch.Tensor:
        """See ``DraftLayers``."""
        return _decoded(self.run(table, states, [state.num_tokens - 1 + ahead for state in states]))

    def run(self, table: SequenceTable, states: list[SequenceState], computed: list[int]) -> torch.Tensor | None:
        """[B, vocab] of what follows each sequence's token after its ``computed`` ones; None where others sample."""
        return self._decodes.logits(table, states, computed)

    @property
    def sparse_mlps(self) -> list[MoeMLP]:
        """Those of the layers that have experts."""
        return [layer.mlp for layer in self._decoder.layers if isinstance(layer.mlp, MoeMLP)]

    def no_rows(self) -> torch.Tensor:
        """Hidden states [0, hidden]."""
        decoder = self._decoder
        return torch.empty(0, decoder.spec.hidden_size, dtype=decoder.dtype, device=decoder.device)

    def _batch(self, size: int) -> DecodeBatch:
        layout = self._kv.layout
        return DecodeBatch(size, len(layout.groups), layout.block_size, self._decoder.device)

    def _compute(self, batch: DecodeBatch, max_seqlen_k: int) -> torch.Tensor | None:
        metadata = batch.metadata(max_seqlen_k)
        with self._kv.same_step():
            hidden = self._decoder.forward(batch.token_ids, batch.positions, self._kv, metadata)
        return self._decoder.logits(hidden)


class DraftModel:
    """A model that guesses. Its KV lies in pages of the same numbers, by the block tables of one of the KV groups.

    It computes what it lacks when a guess is asked for: prompts, tokens that were sampled without it, and prefixes from
    the cache whose pages it has not filled.
    """

    def __init__(
        self, decoder: Decoder, target: ModelSpec, layout: KvLayout, num_blocks: int, kv_dtype: KvType
    ) -> None:
        """``target`` and its ``layout`` are the model that verifies. Raises ConfigError where the two do not suit."""
        spec = decoder.spec
        own = draft_layout(spec, target, layout)
        self._decoder = decoder
        self._table = next(index for index, group in enumerate(layout.groups) if group.window is None)
        self._num_tables = len(layout.groups)
        self._block_size = layout.block_size
        self._kv = KvMemory.allocate(
            own, num_blocks, spec.cache_heads, spec.cache_dim, kv_dtype, decoder.device, decoder.backend
        )
        self._known: dict[RequestId, int] = {}
        """Tokens of each sequence, from its first on, whose KV is there."""
        self._filled = np.zeros(num_blocks, bool)
        """Pages that are full of it."""
        self._decodes = EagerDecodes(self._compute, self._batch)

    def begin(self, table: SequenceTable, plan: StepPlan) -> None:
        """See ``DraftLayers``."""
        for request_id in plan.finished:
            self._known.pop(request_id, None)
        for new in plan.new:
            blocks, shared = new.block_tables[self._table], new.num_computed // self._block_size
            self._filled[blocks[shared:]] = False
            self._known[new.request_id] = _leading(self._filled[blocks[:shared]]) * self._block_size
        for step in plan.sequences:
            if step.new_blocks:
                self._filled[step.new_blocks[self._table]] = False
            self._forget_guesses(table[step.request_id])

    def logits(self, table: SequenceTable, states: list[SequenceState], ahead: int) -> torch.Tensor:
        """See ``DraftLayers``."""
        if not ahead:
            for state in states:
                self._forget_guesses(state)
        known = [self._known[state.request_id] for state in states]
        ends = [state.num_tokens + ahead for state in states]
        if all(end - start == 1 for start, end in zip(known, ends, strict=True)):
            logits = _decoded(self._decodes.logits(table, states, known))
        else:
            logits = self._catch_up(table, states)
        for state, end in zip(states, ends, strict=True):
            self._know(table, state, end)
        return logits

    def _forget_guesses(self, state: SequenceState) -> None:
        """What followed the last token but one may have been guessed wrong."""
        self._known[state.request_id] = min(self._known[state.request_id], state.num_tokens - 1)

    def _know(self, table: SequenceTable, state: SequenceState, end: int) -> None:
        first, last = self._known[state.request_id] // self._block_size, state.num_tokens // self._block_size
        self._filled[table.blocks[self._table].cells[state.row, first:last]] = True
        self._known[state.request_id] = end

    def _catch_up(self, table: SequenceTable, states: list[SequenceState]) -> torch.Tensor:
        steps = [self._missing(state) for state in states]
        batch = pack(table, StepPlan(step=0, sequences=tuple(steps)), self._block_size)
        group = batch.groups[self._table]
        metadata = AttentionMetadata(
            self._tensor(batch.cu_seqlens_q),
            self._tensor(batch.seqused_k),
            self._tensor(group.block_table),
            self._tensor(group.slot_mapping),
            batch.max_seqlen_q,
            batch.max_seqlen_k,
        )
        hidden = self._decoder.forward(
            self._tensor(batch.token_ids), self._tensor(batch.positions), self._kv, (metadata,)
        )
        return _decoded(self._decoder.logits(hidden[self._tensor(batch.sampled_rows)]))

    def _missing(self, state: SequenceState) -> SequenceStep:
        known = self._known[state.request_id]
        return SequenceStep(
            request_id=state.request_id,
            num_computed=known,
            num_tokens=state.num_tokens - known,
            samples=True,
            new_blocks=(),
        )

    def _tensor(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(self._decoder.device, non_blocking=True)

    def _batch(self, size: int) -> DecodeBatch:
        return DecodeBatch(size, self._num_tables, self._block_size, self._decoder.device)

    def _compute(self, batch: DecodeBatch, max_seqlen_k: int) -> torch.Tensor | None:
        metadata = (batch.metadata(max_seqlen_k)[self._table],)
        return self._decoder.logits(self._decoder.forward(batch.token_ids, batch.positions, self._kv, metadata))


def draft_layout(spec: ModelSpec, target: ModelSpec, layout: KvLayout) -> KvLayout:
    """The pages of a drafting model. Raises ConfigError for one that does not suit the target."""
    problem = None
    if spec.vocab_size != target.vocab_size:
        problem = f"the drafting model has {spec.vocab_size} tokens, the model {target.vocab_size}"
    elif len(set(spec.layer_windows)) > 1:
        problem = "a drafting model whose layers have different windows is not supported"
    elif all(group.window is not None for group in layout.groups):
        problem = "draft_model is not supported for a model whose layers all have a sliding window"
    if problem is not None:
        raise ConfigError(f"speculative_config: {problem}", param="speculative_config")
    group = KvGroup(tuple(range(spec.num_layers)), spec.layer_windows[0])
    return KvLayout((group,), spec.num_layers, layout.block_size)


def _leading(flags: np.ndarray) -> int:
    """How many are true before the first that is not."""
    return len(flags) if flags.all() else int(flags.argmin())


def _decoded(logits: torch.Tensor | None) -> torch.Tensor:
    assert logits is not None, "only the rank that samples drafts"
    return logits
