"""How one replica of a model is cut: what each rank holds, and what that weighs.

Pure arithmetic over ModelSpec and Topology. Query, KV and latent heads, MLPs and the vocabulary are cut over a tp
group; layers over the stages; experts over the ep ranks. What cannot be cut is refused with what would fit.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import lcm
from typing import Literal

from .errors import ConfigError
from .expert_placement import ExpertPlacement, initial_placement
from .head_cuts import HeadCut, cut_heads
from .kv_formats import KvFormat
from .model_spec import ModelSpec
from .model_tensors import (
    EMBEDDING,
    Dim,
    Dims,
    count_elements,
    dim_sizes,
    end_tensors,
    expert_tensors,
    layer_tensors,
)
from .splits import split_by_cost, split_by_share, split_evenly
from .topology import RankPlace, Topology
from .weight_formats import KeptWeights, WeightFormat

Balance = Literal["work", "memory"]
DECODE_TOKENS = 16
"""Tokens of the step that stages and ranks are balanced for: they tell how many experts are read."""
DECODE_CONTEXT = 128
"""Keys that each of them sees. With them a layer of SmolLM2 weighs a sixth of its head, as measured, not an eighth."""
_NO_LINEARS: tuple[Dim, ...] = ("experts", "one", "kv_expanded")
"""First dimensions of gates, and of what MLA makes keys and values of heads with."""
_FLOAT_UNIT = 32
"""MLP columns of unquantised weights are cut at multiples of this where they can be: vector kernels like it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankLayout:
    """What one rank holds."""

    spec: ModelSpec
    place: RankPlace
    layers: range
    has_embedding: bool
    has_head: bool
    samples: bool
    heads: HeadCut
    cuts: Mapping[Dim, range]
    """The part of every dimension, in elements; whole where the rank holds all of it."""
    experts: tuple[int, ...]
    """In the slots of every sparse layer, as placed at the start."""

    def tensors(self) -> dict[str, Dims]:
        """Every tensor of a checkpoint that the rank reads a part of.

        Biases of output and down projections are whole on every rank, which may not need them: see ``loaded``.
        """
        tensors = end_tensors(self.spec, first=self.has_embedding, last=self.has_head)
        for layer in self.layers:
            tensors |= layer_tensors(self.spec, layer)
            if self.spec.is_sparse(layer):
                for expert in self.experts:
                    tensors |= expert_tensors(self.spec, layer, expert)
        return tensors

    def part(self, dims: Dims) -> tuple[range, ...]:
        """The rank's part of a tensor, one range a dimension."""
        return tuple(self.cuts[dim] for dim in dims)

    @property
    def num_parameters(self) -> int:
        """Weights that the rank holds."""
        return count_elements(self.tensors(), {dim: len(part) for dim, part in self.cuts.items()})

    def loaded(self) -> dict[str, Dims]:
        """Those of ``tensors`` that it keeps.

        Biases of linears whose outputs are summed over a tp group are added by its first rank alone.
        """
        return {
            name: dims
            for name, dims in self.tensors().items()
            if self.place.tp_rank == 0 or dims != ("hidden",) or not name.endswith(".bias")
        }

    def linears(self) -> list[str]:
        """The weights of its linears; gates, and what MLA keeps beside them, are none."""
        return [
            name
            for name, dims in self.tensors().items()
            if len(dims) > 1
            and dims[0] not in _NO_LINEARS
            and (name != EMBEDDING or (self.has_head and self.spec.tie_embeddings))
        ]

    def weight_bytes(self, kept: KeptWeights) -> int:
        """Bytes that the rank's weights take on its device once they are loaded."""
        return sum(self._tensor_bytes(name, dims, kept) for name, dims in self.loaded().items())

    def copied_bytes(self, kept: KeptWeights) -> int:
        """Bytes of the second copies that it may have beside ``weight_bytes``: see ``KeptWeights.is_copied``."""
        if not kept.is_copied:
            return 0
        tensors = self.tensors()
        copied = {name: tensors[name] for name in self.linears() if ".experts." not in name}
        return 2 * count_elements(copied, {dim: len(part) for dim, part in self.cuts.items()})

    def _tensor_bytes(self, name: str, dims: Dims, kept: KeptWeights) -> int:
        sizes = [len(part) for part in self.part(dims)]
        if len(sizes) == 1:
            return kept.vector_bytes(sizes[0])
        rows, columns = sizes
        if name == EMBEDDING:
            table = kept.table.matrix_bytes(rows, columns) * self.has_embedding
            is_shared = self.has_embedding and kept.ties_head
            has_linear = self.has_head and self.spec.tie_embeddings and not is_shared
            return table + kept.linear_bytes(name, rows, columns) * has_linear
        if dims[0] in _NO_LINEARS:
            return (kept.latents if dims[0] == "kv_expanded" else kept.gates).matrix_bytes(rows, columns)
        return kept.linear_bytes(name, rows, columns)

    def kv_page_bytes(self, fmt: KvFormat, block_size: int) -> int:
        """Bytes of ``block_size`` cached tokens in one layer, scales included. MLA caches one latent, on every rank."""
        if self.spec.mla is not None:
            return fmt.key.page_bytes(self.spec.mla.cached_size, block_size)
        return len(self.heads.kv) * fmt.page_bytes(self.spec.head_dim, block_size)

    def kv_open_page_bytes(self, fmt: KvFormat, block_size: int) -> int:
        """Bytes of an open page in one layer, which quantised formats have beside a page that tokens still join."""
        return (
            0 if self.spec.mla is not None else len(self.heads.kv) * fmt.open_page_bytes(self.spec.head_dim, block_size)
        )

    def kv_token_bytes(self, fmt: KvFormat, block_size: int = 16) -> float:
        """Bytes of one cached token in all of the rank's layers."""
        return len(self.layers) * self.kv_page_bytes(fmt, block_size) / block_size


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelLayout:
    """All ranks of a replica."""

    spec: ModelSpec
    topology: Topology
    ranks: tuple[RankLayout, ...]
    placement: ExpertPlacement | None
    """Of every sparse layer at the start; None for dense models."""

    @classmethod
    def of(
        cls,
        spec: ModelSpec,
        topology: Topology,
        *,
        num_redundant_experts: int = 0,
        weights: WeightFormat | None = None,
        balance: Balance = "work",
    ) -> "ParallelLayout":
        """Cut a model. Raises ConfigError, naming the key, for what cannot be cut so.

        ``weights``: quantised groups are not torn. ``balance``: stages have about equal ``work`` (weights that a
        decode step reads: of the embedding nothing to speak of) or equal ``memory``.
        """
        placement = _placement(spec, topology, num_redundant_experts)
        whole: dict[Dim, range] = {dim: range(size) for dim, size in dim_sizes(spec).items()}
        heads = cut_heads(spec, topology.tp, 1 if weights is None else weights.group)
        cuts = [whole | cut for cut in _cut_dims(spec, topology, heads, weights)]
        stages = _stages(spec, topology.pp, {dim: len(part) for dim, part in cuts[0].items()}, placement, balance)
        ranks = [
            RankLayout(
                spec=spec,
                place=place,
                layers=stages[place.stage],
                has_embedding=topology.holds_embedding(place.rank),
                has_head=topology.holds_head(place.rank),
                samples=topology.samples(place.rank),
                heads=heads[place.tp_rank],
                cuts=cuts[place.rank % topology.stage_size],
                experts=() if placement is None else placement.slots[place.ep_rank],
            )
            for place in topology.places()
        ]
        return cls(spec=spec, topology=topology, ranks=tuple(ranks), placement=placement)

    @property
    def stages(self) -> list[range]:
        """The layers of each stage."""
        return [self.ranks[group[0]].layers for group in self.topology.stage_groups]


def _placement(spec: ModelSpec, topology: Topology, num_redundant: int) -> ExpertPlacement | None:
    if spec.moe is not None:
        return initial_placement(spec.moe.num_experts, topology.ep, num_redundant)
    for key, given in (("expert_parallel_size", topology.ep > 1), ("num_redundant_experts", num_redundant)):
        if given:
            raise ConfigError(
                f"{key}: the model ({spec.architecture}) has no experts; leave expert parallelism away", param=key
            )
    return None


def _cut_dims(
    spec: ModelSpec, topology: Topology, heads: list[HeadCut], weights: WeightFormat | None
) -> list[dict[Dim, range]]:
    """The parts of each rank of a stage, in every dimension that is cut."""
    group = 1 if weights is None else weights.group
    even, shares = [1.0] * topology.tp, _mlp_shares(spec, heads)
    vocabulary = split_evenly(spec.vocab_size, topology.tp)
    is_dense = not all(spec.is_sparse(layer) for layer in range(spec.num_layers))
    inner = _cut_inner("MLP", spec.intermediate_size, shares, group) if is_dense else []
    shared, expert = list[range](), list[range]()
    if spec.moe is not None:
        expert = _cut_inner("experts' MLP", spec.moe.intermediate_size, [1.0] * topology.expert_tp, group)
        if spec.moe.shared_intermediate_size:
            shared = _cut_inner("shared experts' MLP", spec.moe.shared_intermediate_size, even, group)
    parts: list[dict[Dim, range]] = []
    for place in topology.places()[: topology.stage_size]:
        part: dict[Dim, range] = {**heads[place.tp_rank].dims(spec), "vocab": vocabulary[place.tp_rank]}
        if inner:
            part["inner"] = inner[place.tp_rank]
        if shared:
            part["shared_inner"] = shared[place.tp_rank]
        if expert:
            part["expert_inner"] = expert[place.expert_tp_rank]
        parts.append(part)
    return parts


def _mlp_shares(spec: ModelSpec, heads: list[HeadCut]) -> list[float]:
    """A rank with more heads than others gets that much less of a dense MLP: in columns, by what a step reads."""
    attention = [
        2 * (len(cut.queries) + len(cut.kv)) * spec.head_dim
        + _cached_reads(spec, len(cut.kv) * spec.head_dim) / spec.hidden_size
        for cut in heads
    ]
    even = (sum(attention) + 3 * spec.intermediate_size) / len(heads)
    return [max(0.0, even - cost) for cost in attention]


def _cut_inner(name: str, size: int, shares: list[float], group: int) -> list[range]:
    """Columns in whole groups for each share."""
    if len(shares) == 1:
        return [range(size)]
    units = [unit for unit in (lcm(group, _FLOAT_UNIT), group) if size % unit == 0 and size // unit >= len(shares)]
    if not units:
        most = size // group if size % group == 0 else 1
        raise ConfigError(
            f"tensor_parallel_size: the model's {name} of {size} columns has no {len(shares)} parts"
            f" in groups of {group}; at most {most} fit",
            param="tensor_parallel_size",
        )
    return split_by_share(size, shares, units[0])


def _stages(
    spec: ModelSpec, pp: int, sizes: Mapping[Dim, int], placement: ExpertPlacement | None, balance: Balance
) -> list[range]:
    if pp > spec.num_layers:
        raise ConfigError(
            f"pipeline_parallel_size: {pp} stages are more than the model's {spec.num_layers} layers;"
            f" at most {spec.num_layers} fit",
            param="pipeline_parallel_size",
        )
    table = sizes["vocab"] * sizes["hidden"]
    costs = [_layer_cost(spec, layer, sizes, placement, balance) for layer in range(spec.num_layers)]
    return split_by_cost(costs, pp, first=table if balance == "memory" else 0, last=table)


def _layer_cost(
    spec: ModelSpec, layer: int, sizes: Mapping[Dim, int], placement: ExpertPlacement | None, balance: Balance
) -> float:
    """Weights of a layer that a rank holds; or those that it reads in a step, and keys and values."""
    cost: float = count_elements(layer_tensors(spec, layer), sizes)
    if balance == "work":
        cost += _cached_reads(spec, sizes["keys"])
    if spec.moe is not None and placement is not None and spec.is_sparse(layer):
        read = spec.moe.touched_experts(DECODE_TOKENS) / placement.num_ranks
        experts = placement.slots_per_rank if balance == "memory" else read
        cost += experts * count_elements(expert_tensors(spec, layer, 0), sizes)
    return cost


def _cached_reads(spec: ModelSpec, key_size: int) -> int:
    """Elements of a layer's keys and values that a step reads, of heads that have ``key_size`` elements together."""
    cached = 2 * key_size if spec.mla is None else spec.mla.cached_size
    return DECODE_TOKENS * DECODE_CONTEXT * cached
