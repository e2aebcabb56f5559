"""A rank's share of a model: what it holds, and whom it sums with."""

from dataclasses import dataclass

from ...cluster.model_spec import ModelSpec
from ...cluster.parallel_layout import ParallelLayout, RankLayout
from ...cluster.topology import Topology
from .groups import Groups
from .solo import SoloGroup
from .traffic import Traffic


@dataclass(frozen=True, slots=True)
class Shard:
    """One rank of a replica."""

    layout: ParallelLayout
    rank: int
    groups: Groups

    @classmethod
    def whole(cls, spec: ModelSpec) -> "Shard":
        """The only rank of a model that is not cut."""
        solo = SoloGroup()
        groups = Groups(tp=solo, pp=solo, ep=solo, control=solo, traffic=Traffic())
        return cls(ParallelLayout.of(spec, Topology()), 0, groups)

    @property
    def own(self) -> RankLayout:
        """What the rank holds."""
        return self.layout.ranks[self.rank]
