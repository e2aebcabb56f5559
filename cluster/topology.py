"""Which rank of a replica does what: pipeline stages, tensor, expert and data parallel groups.

A stage has as many ranks as the larger of tp and ep, one of which divides the other:

- **ep <= tp**: attention is split over all tp ranks and every rank sees every token. Experts are spread over ep
  parts of the stage, and each expert is split over the ``expert_tp`` = tp / ep ranks of its part. No token has to
  move: each rank adds up its own experts' outputs, and the sum over ranks is the all-reduce that ends any MLP.
- **ep > tp**: attention is data-parallel over ``attention_dp`` = ep / tp groups of tp ranks, each with its own
  requests and KV cache. Whole experts are spread over all ep ranks; tokens go to their experts and back by
  all-to-all, where each rank of a tp group sends its share of the group's tokens.

So in every layer attention and MLP end in one all-reduce over the tp group, and expert parallelism adds dispatch
and combine only where attention is data-parallel.

rank = stage * stage_size + dp_rank * tp + tp_rank, which is stage * tp + tp_rank without data parallelism.
"""

from dataclasses import dataclass

from .errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlace:
    """Coordinates of one rank."""

    rank: int
    stage: int
    dp_rank: int
    tp_rank: int
    ep_rank: int
    expert_tp_rank: int
    """Which part of its experts' weights the rank has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """Sizes of a replica's groups. Raises ConfigError for sizes that do not go together."""

    tp: int = 1
    pp: int = 1
    ep: int = 1

    def __post_init__(self) -> None:
        for key, size in (("tensor", self.tp), ("pipeline", self.pp), ("expert", self.ep)):
            if size < 1:
                name = f"{key}_parallel_size"
                raise ConfigError(f"{name}: {size} is less than 1", param=name)
        if self.tp % self.ep and self.ep % self.tp:
            fits = [size for size in range(1, self.tp) if self.tp % size == 0] + [self.tp, 2 * self.tp, 3 * self.tp]
            raise ConfigError(
                f"expert_parallel_size: {self.ep} neither divides tensor_parallel_size ({self.tp}) nor is a multiple"
                f" of it; {', '.join(map(str, fits))}, ... fit",
                param="expert_parallel_size",
            )

    @property
    def stage_size(self) -> int:
        """Ranks of one pipeline stage."""
        return max(self.tp, self.ep)

    @property
    def world_size(self) -> int:
        """Ranks of the replica."""
        return self.pp * self.stage_size

    @property
    def attention_dp(self) -> int:
        """Groups of tp ranks in a stage that serve different requests."""
        return self.stage_size // self.tp

    @property
    def expert_tp(self) -> int:
        """Ranks that share each expert's weights."""
        return self.stage_size // self.ep

    @property
    def exchanges_tokens(self) -> bool:
        """Whether tokens travel to their experts."""
        return self.attention_dp > 1

    def place(self, rank: int) -> RankPlace:
        """Coordinates of a rank."""
        stage, local = divmod(rank, self.stage_size)
        return RankPlace(
            rank=rank,
            stage=stage,
            dp_rank=local // self.tp,
            tp_rank=local % self.tp,
            ep_rank=local // self.expert_tp,
            expert_tp_rank=local % self.expert_tp,
        )

    def places(self) -> list[RankPlace]:
        """Coordinates of all ranks, in order."""
        return [self.place(rank) for rank in range(self.world_size)]

    @property
    def control_group(self) -> list[int]:
        """All ranks: start, health and shutdown."""
        return list(range(self.world_size))

    @property
    def stage_groups(self) -> list[list[int]]:
        """Ranks of each stage: those to pack on one node."""
        return [list(range(first, first + self.stage_size)) for first in range(0, self.world_size, self.stage_size)]

    @property
    def tp_groups(self) -> list[list[int]]:
        """Ranks that reduce together after attention and MLP. Every rank is in one group of each kind."""
        return [list(range(first, first + self.tp)) for first in range(0, self.world_size, self.tp)]

    @property
    def ep_groups(self) -> list[list[int]]:
        """Ranks of a stage that hold the same part of different experts, by ep_rank."""
        return [stage[part :: self.expert_tp] for stage in self.stage_groups for part in range(self.expert_tp)]

    @property
    def pp_groups(self) -> list[list[int]]:
        """Ranks that hand hidden states on, by stage."""
        return [list(range(first, self.world_size, self.stage_size)) for first in range(self.stage_size)]

    @property
    def attention_groups(self) -> list[list[int]]:
        """Ranks that serve the same requests, in all stages, by dp_rank."""
        return [[place.rank for place in self.places() if place.dp_rank == group] for group in range(self.attention_dp)]

    def previous_rank(self, rank: int) -> int | None:
        """The rank that hidden states come from; None in the first stage."""
        return None if self.holds_embedding(rank) else rank - self.stage_size

    def next_rank(self, rank: int) -> int | None:
        """The rank that hidden states go to; None in the last stage."""
        return None if self.holds_head(rank) else rank + self.stage_size

    def holds_embedding(self, rank: int) -> bool:
        """Whether the rank is in the first stage."""
        return rank < self.stage_size

    def holds_head(self, rank: int) -> bool:
        """Whether the rank is in the last stage."""
        return rank >= self.world_size - self.stage_size

    def samples(self, rank: int) -> bool:
        """Whether the rank gathers its tp group's logits and samples: the first of each group in the last stage."""
        return self.holds_head(rank) and rank % self.tp == 0

    @property
    def sampling_ranks(self) -> list[int]:
        """The ranks that sample, by dp_rank."""
        return [rank for rank in range(self.world_size) if self.samples(rank)]
