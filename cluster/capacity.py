"""Capacity plan: what weights and KV cache cost on each device, and how many sequences that leaves room for.

Pure arithmetic over ModelSpec and KvLayout; sizes in bytes per device unless the name says otherwise. With tp ranks
heads, MLP and vocabulary are split (KV heads replicated when tp exceeds them); with pp stages the layers are.
"""

from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from .errors import ConfigError
from .kv_formats import KvFormat
from .kv_layout import KvLayout
from .model_spec import ModelSpec

WEIGHT_BYTES: dict[str, float] = {
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    # A float16 scale, and where there is one a minimum, for 32 weights.
    "int8": 34 / 32,
    "q8_0": 34 / 32,
    "q4_0": 18 / 32,
    "q4_1": 20 / 32,
    "q4_k": 20 / 32,
}
"""Bytes of a weight in memory. Formats of less than two bytes are those of linears: embeddings stay float16."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shards:
    """How one replica is split: ``tp`` ranks in each of ``pp`` stages."""

    tp: int = 1
    pp: int = 1

    @property
    def devices(self) -> int:
        """Devices of one replica."""
        return self.tp * self.pp

    def check(self, spec: ModelSpec) -> None:
        """Raise ConfigError if the model cannot be split so."""
        if self.tp < 1 or spec.num_heads % self.tp:
            raise ConfigError(f"tp: {self.tp} does not divide the model's {spec.num_heads} attention heads", param="tp")
        if spec.num_kv_heads % self.tp and self.tp % spec.num_kv_heads:
            raise ConfigError(
                f"tp: {self.tp} neither divides the model's {spec.num_kv_heads} KV heads nor is a multiple", param="tp"
            )
        if not 1 <= self.pp <= spec.num_layers:
            raise ConfigError(f"pp: {self.pp} is not between 1 and the model's {spec.num_layers} layers", param="pp")

    def kv_heads(self, spec: ModelSpec) -> int:
        """KV heads on each tensor-parallel rank."""
        return max(1, spec.num_kv_heads // self.tp)

    def stages(self, spec: ModelSpec) -> list[range]:
        """The layers of each stage: contiguous, the earlier stages one longer where they cannot be equal."""
        size, longer = divmod(spec.num_layers, self.pp)
        starts = [stage * size + min(stage, longer) for stage in range(self.pp + 1)]
        return [range(*ends) for ends in pairwise(starts)]


def rank_parameters(spec: ModelSpec, shards: Shards, stage: int) -> int:
    """Parameters on one rank of a stage. Tied embeddings stand in both the first and the last stage."""
    tp, hidden = shards.tp, spec.hidden_size
    heads = spec.num_heads // tp * spec.head_dim
    kv = shards.kv_heads(spec) * spec.head_dim
    intermediate = -(-spec.intermediate_size // tp)
    attention = hidden * (heads + 2 * kv) + heads * hidden + (heads + 2 * kv) * spec.qkv_bias + hidden * spec.o_bias
    mlp = 3 * hidden * intermediate + (2 * intermediate + hidden) * spec.mlp_bias
    norms = hidden * (4 if spec.sandwich_norms else 2) + 2 * spec.head_dim * spec.qk_norm
    first, last = stage == 0, stage == shards.pp - 1
    tables = first + last - (first and last and spec.tie_embeddings)
    embeddings = tables * -(-spec.vocab_size // tp) * hidden
    return len(shards.stages(spec)[stage]) * (attention + mlp + norms) + embeddings + hidden * last


def rank_weight_bytes(spec: ModelSpec, shards: Shards, stage: int, dtype: str) -> int:
    """Bytes of those parameters. Raises ConfigError for an unknown ``dtype``."""
    if dtype not in WEIGHT_BYTES:
        raise ConfigError(f"dtype: {dtype!r} is not one of {', '.join(WEIGHT_BYTES)}", param="dtype")
    each = WEIGHT_BYTES[dtype]
    size = rank_parameters(spec, shards, stage) * each
    if each < 2 and stage == 0:
        # The embedding is float16; tied to a head on this rank, it stands beside the head's quantised copy.
        tied = spec.tie_embeddings and shards.pp == 1
        size += -(-spec.vocab_size // shards.tp) * spec.hidden_size * (2 if tied else 2 - each)
    return int(size)


@dataclass(frozen=True, slots=True, kw_only=True)
class KvCost:
    """KV bytes of one rank of one pipeline stage."""

    layout: KvLayout
    layer_page_bytes: int
    """``block_size`` tokens of one layer."""
    layers: int

    @classmethod
    def of(cls, spec: ModelSpec, kv_format: KvFormat, block_size: int, shards: Shards, stage: int) -> "KvCost":
        """The cost in one stage."""
        layers = shards.stages(spec)[stage]
        layout = KvLayout.of(tuple(spec.layer_windows[layer] for layer in layers), block_size)
        return cls(
            layout=layout,
            layer_page_bytes=shards.kv_heads(spec) * kv_format.page_bytes(spec.head_dim, block_size),
            layers=len(layers),
        )

    @property
    def page_bytes(self) -> int:
        """One page: ``block_size`` tokens of one KV group."""
        return self.layout.slots * self.layer_page_bytes

    @property
    def layer_token_bytes(self) -> float:
        """One token in one layer, scales included."""
        return self.layer_page_bytes / self.layout.block_size

    @property
    def token_bytes(self) -> float:
        """One token in all layers, as long as every window sees it."""
        return self.layers * self.layer_token_bytes

    def sequence_pages(self, num_tokens: int) -> int:
        """Pages that a sequence holds; groups with a window at most their window."""
        return sum(self.layout.blocks_for(group, num_tokens) for group in range(len(self.layout.groups)))

    def sequence_bytes(self, num_tokens: int) -> int:
        """Bytes of those pages."""
        return self.sequence_pages(num_tokens) * self.page_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class CapacityPlan:
    """What one replica needs on each device of its fullest pipeline stage."""

    devices: int
    """Devices of a replica."""
    parameters: int
    """Of the whole model."""
    max_model_len: int
    weight_bytes: int
    kv_format: str
    kv_token_bytes_per_layer: float
    kv_token_bytes: float
    """In all layers of the stage, before any window has passed."""
    kv_token_bytes_all_devices: float
    """In the whole replica, heads that are replicated over ranks counted as often."""
    kv_sequence_bytes: int
    """One sequence of ``max_model_len`` tokens, in whole pages."""
    page_bytes: int
    memory_bytes: int
    """What weights and KV may use together."""
    kv_bytes: int
    """What the weights leave; negative when they do not fit."""
    num_blocks: int
    """Pages in the pool, the null page included."""
    max_sequences: int
    """Sequences of ``max_model_len`` tokens at the same time."""
    max_cached_tokens: int
    """Longest single sequence, if no other runs (up to ``max_model_len``)."""

    @property
    def limit(self) -> Literal["weights", "sequence"] | None:
        """What does not fit, or None."""
        if self.kv_bytes < 0:
            return "weights"
        return "sequence" if self.max_sequences < 1 else None

    @property
    def missing_bytes(self) -> int:
        """How much more memory a device needs for weights and one sequence of ``max_model_len`` (0: it fits)."""
        one_sequence = self.kv_sequence_bytes + self.page_bytes
        return max(0, self.weight_bytes + one_sequence - self.memory_bytes)


def plan_capacity(
    spec: ModelSpec,
    *,
    memory_bytes: int,
    dtype: str,
    kv_format: KvFormat,
    max_model_len: int | None = None,
    block_size: int = 16,
    shards: Shards | None = None,
) -> CapacityPlan:
    """Plan for devices that give ``memory_bytes`` each to weights and KV. Raises ConfigError.

    The stage that allows the fewest sequences decides, among equals the one with the heaviest weights.
    """
    shards = shards or Shards()
    shards.check(spec)
    length = _model_len(spec, max_model_len)
    costs = [KvCost.of(spec, kv_format, block_size, shards, stage) for stage in range(shards.pp)]
    all_devices = sum(cost.token_bytes for cost in costs) * shards.tp
    weights = [rank_weight_bytes(spec, shards, stage, dtype) for stage in range(shards.pp)]
    stages = [
        _plan_stage(spec, shards, cost, length, memory_bytes, weight, kv_format.name, all_devices)
        for cost, weight in zip(costs, weights, strict=True)
    ]
    return min(stages, key=lambda plan: (plan.max_sequences, -plan.missing_bytes, plan.kv_bytes))


def _model_len(spec: ModelSpec, max_model_len: int | None) -> int:
    if max_model_len is None:
        return spec.max_position
    if not 1 <= max_model_len <= spec.max_position:
        raise ConfigError(
            f"max_model_len: {max_model_len} is not between 1 and the model's context of {spec.max_position}",
            param="max_model_len",
        )
    return max_model_len


def _plan_stage(
    spec: ModelSpec,
    shards: Shards,
    cost: KvCost,
    length: int,
    memory: int,
    weights: int,
    kv_format: str,
    all_devices: float,
) -> CapacityPlan:
    kv_bytes = memory - weights
    num_blocks = max(0, kv_bytes // cost.page_bytes)
    usable = max(0, num_blocks - 1)  # page 0 is the null page
    return CapacityPlan(
        devices=shards.devices,
        parameters=spec.num_parameters,
        max_model_len=length,
        weight_bytes=weights,
        kv_format=kv_format,
        kv_token_bytes_per_layer=cost.layer_token_bytes,
        kv_token_bytes=cost.token_bytes,
        kv_token_bytes_all_devices=all_devices,
        kv_sequence_bytes=cost.sequence_bytes(length),
        page_bytes=cost.page_bytes,
        memory_bytes=memory,
        kv_bytes=kv_bytes,
        num_blocks=num_blocks,
        max_sequences=usable // cost.sequence_pages(length),
        max_cached_tokens=_longest(cost, usable, length),
    )


def _longest(cost: KvCost, usable: int, length: int) -> int:
    """Most tokens of one sequence whose pages fit, by bisection: pages never shrink as it grows."""
    low, high = 0, length
    while low < high:
        middle = (low + high + 1) // 2
        if cost.sequence_pages(middle) <= usable:
            low = middle
        else:
            high = middle - 1
    return low


def smallest_fit(
    spec: ModelSpec,
    *,
    memory_bytes: int,
    dtype: str,
    kv_format: KvFormat,
    max_model_len: int | None = None,
    block_size: int = 16,
) -> Shards | None:
    """Fewest devices (tensor parallel up to 8, then pipeline) that hold the weights and one full sequence."""
    candidates = sorted(
        (Shards(tp=tp, pp=pp) for tp in (1, 2, 4, 8) for pp in (1, 2, 4, 8)), key=lambda s: (s.devices, s.pp)
    )
    for shards in candidates:
        try:
            plan = plan_capacity(
                spec,
                memory_bytes=memory_bytes,
                dtype=dtype,
                kv_format=kv_format,
                max_model_len=max_model_len,
                block_size=block_size,
                shards=shards,
            )
        except ConfigError:  # heads or layers do not divide
            continue
        if plan.limit is None:
            return shards
    return None
