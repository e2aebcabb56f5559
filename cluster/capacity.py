"""Capacity plan: what weights and KV cache cost on every rank, and how many sequences that leaves room for.

Pure arithmetic over ParallelLayout and KvLayout; sizes in bytes, per rank unless the name says otherwise.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from .errors import ConfigError
from .kv_formats import KV_FORMATS, KvFormat
from .kv_layout import KvLayout, blocks_in
from .model_spec import ModelSpec
from .parallel_layout import ParallelLayout, RankLayout
from .topology import Topology
from .weight_formats import KeptWeights, WeightFormat

MOST_TP = 8
"""``smallest_fit`` asks for no more ranks of a stage, which share a node."""
MOST_STAGES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftNeeds:
    """What drafting layers with weights of their own take, on each rank that samples."""

    weight_bytes: int
    page_bytes: int = 0
    """Beside each page of the model's; 0: they cache nothing."""

    @classmethod
    def of_model(cls, spec: ModelSpec, weights: KeptWeights, kv_format: KvFormat, block_size: int) -> "DraftNeeds":
        """A whole model that drafts. Its pages are never quantised: fp16 then."""
        (whole,) = ParallelLayout.of(spec, Topology()).ranks
        plain = KV_FORMATS["fp16"] if kv_format.is_quantised else kv_format
        return cls(
            weight_bytes=whole.weight_bytes(weights),
            page_bytes=spec.num_layers * whole.kv_page_bytes(plain, block_size),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """What each rank has, and what it is used for."""

    memory_bytes: int
    """What weights and KV of a rank may use together."""
    weights: KeptWeights
    kv_format: KvFormat
    max_model_len: int
    block_size: int = 16
    max_num_seqs: int = 256
    step_tokens: int = 2048
    """Most tokens of a step. With ``max_num_seqs`` it bounds the open pages of quantised formats."""
    draft: DraftNeeds | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlan:
    """What one rank needs."""

    layout: RankLayout
    weight_bytes: int
    """Of its part of the model."""
    draft_weight_bytes: int
    """Of what drafts here beside it."""
    kv_token_bytes: float
    """One token in all of its layers, as long as every window sees it."""
    page_bytes: int
    """One page: ``block_size`` tokens of one KV group, and what drafting layers cache of them."""
    open_page_bytes: int
    """One page of a quantised format that tokens still join, beside the page itself."""
    open_pages: int
    """Most of them."""
    kv_bytes: int
    """What the weights leave; negative when they do not fit."""

    @classmethod
    def of(cls, layout: RankLayout, pages: KvLayout, needs: Needs) -> "RankPlan":
        """The plan of a rank; ``pages`` are those of the whole model."""
        weight_bytes = layout.weight_bytes(needs.weights)
        draft = needs.draft if layout.samples and needs.draft is not None else DraftNeeds(weight_bytes=0)
        slots = pages.stage(layout.layers).slots
        return cls(
            layout=layout,
            weight_bytes=weight_bytes,
            draft_weight_bytes=draft.weight_bytes,
            kv_token_bytes=layout.kv_token_bytes(needs.kv_format, needs.block_size),
            page_bytes=slots * layout.kv_page_bytes(needs.kv_format, needs.block_size) + draft.page_bytes,
            open_page_bytes=slots * layout.kv_open_page_bytes(needs.kv_format, needs.block_size),
            open_pages=pages.open_pages(needs.max_num_seqs, needs.step_tokens),
            kv_bytes=needs.memory_bytes - weight_bytes - draft.weight_bytes,
        )

    @property
    def num_blocks(self) -> int:
        """Pages that it has room for."""
        return blocks_in(self.kv_bytes, self.page_bytes, self.open_page_bytes, self.open_pages)

    def pages_bytes(self, count: int) -> int:
        """So many pages, and those that may be open beside them."""
        return count * self.page_bytes + min(count, self.open_pages) * self.open_page_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class CapacityPlan:
    """What one replica needs. One block table serves all ranks, so the rank with the fewest pages decides."""

    layout: ParallelLayout
    needs: Needs
    ranks: tuple[RankPlan, ...]
    pages: KvLayout

    @property
    def tightest(self) -> RankPlan:
        """The rank that allows the fewest pages, among equals the one that lacks the most memory."""
        return min(self.ranks, key=lambda rank: (rank.num_blocks, -self._missing(rank), rank.kv_bytes))

    @property
    def num_blocks(self) -> int:
        """Pages in the pool of every rank, the null page included."""
        return self.tightest.num_blocks

    @property
    def max_sequences(self) -> int:
        """Sequences of ``max_model_len`` tokens at the same time, in all groups with requests of their own."""
        each = self._usable // self.pages.sequence_blocks(self.needs.max_model_len)
        return each * self.layout.topology.attention_dp

    @property
    def max_cached_tokens(self) -> int:
        """Longest single sequence, if no other runs (up to ``max_model_len``)."""
        usable, low, high = self._usable, 0, self.needs.max_model_len
        while low < high:  # by bisection: pages never shrink as it grows
            middle = (low + high + 1) // 2
            if self.pages.sequence_blocks(middle) <= usable:
                low = middle
            else:
                high = middle - 1
        return low

    @property
    def kv_token_bytes(self) -> float:
        """One token in all layers on all ranks that cache it, heads that are on several ranks counted as often."""
        return sum(rank.kv_token_bytes for rank in self.ranks) / self.layout.topology.attention_dp

    def sequence_bytes(self, rank: RankPlan) -> int:
        """One sequence of ``max_model_len`` tokens on a rank, in whole pages."""
        return self.pages.sequence_blocks(self.needs.max_model_len) * rank.page_bytes

    @property
    def limit(self) -> Literal["weights", "sequence"] | None:
        """What does not fit, or None."""
        if any(rank.kv_bytes < 0 for rank in self.ranks):
            return "weights"
        return "sequence" if self.max_sequences < 1 else None

    @property
    def missing_bytes(self) -> int:
        """How much more memory ranks need for weights and one sequence of ``max_model_len`` (0: it fits)."""
        return max(self._missing(rank) for rank in self.ranks)

    @property
    def _usable(self) -> int:
        return max(0, self.num_blocks - 1)  # page 0 is the null page

    def _missing(self, rank: RankPlan) -> int:
        least = self.pages.sequence_blocks(self.needs.max_model_len) + 1
        return max(0, rank.pages_bytes(least) - rank.kv_bytes)


def plan_capacity(layout: ParallelLayout, needs: Needs) -> CapacityPlan:
    """Plan a replica that is cut so. Raises ConfigError for a length that the model has not."""
    spec = layout.spec
    if not 1 <= needs.max_model_len <= spec.max_position:
        raise ConfigError(
            f"max_model_len: {needs.max_model_len} is not between 1 and the model's context of {spec.max_position}",
            param="max_model_len",
        )
    pages = KvLayout.of(spec.layer_windows, needs.block_size)
    ranks = tuple(RankPlan.of(rank, pages, needs) for rank in layout.ranks)
    return CapacityPlan(layout=layout, needs=needs, ranks=ranks, pages=pages)


def smallest_fit(spec: ModelSpec, needs: Needs, stored: WeightFormat | None = None) -> Topology | None:
    """The fewest ranks that hold the weights and one full sequence: tensor parallel first, then stages.

    Experts stay whole where their number allows it. ``stored``: see ``ParallelLayout.of``.
    """
    whole = ParallelLayout.of(spec, Topology()).ranks[0].weight_bytes(needs.weights)
    for topology in _candidates(spec):
        if whole > topology.world_size * needs.memory_bytes:
            continue
        try:
            layout = ParallelLayout.of(spec, topology, weights=stored)
        except ConfigError:  # what cannot be cut so
            continue
        if plan_capacity(layout, needs).limit is None:
            return topology
    return None


def _candidates(spec: ModelSpec) -> Iterator[Topology]:
    """Cheapest first."""
    sizes = [(tp, pp) for tp in range(1, MOST_TP + 1) for pp in range(1, min(MOST_STAGES, spec.num_layers) + 1)]
    for tp, pp in sorted(sizes, key=lambda size: (size[0] * size[1], size[1])):
        if spec.moe is not None and tp > 1:
            yield Topology(tp=tp, pp=pp, ep=tp)
        yield Topology(tp=tp, pp=pp)
