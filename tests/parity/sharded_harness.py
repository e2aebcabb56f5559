"""A sharded model whose ranks are threads of this process."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch

from warmroot.actors.attention.kv_memory import KvMemory
from warmroot.actors.models.decoder import Decoder
from warmroot.actors.models.loader import load_model
from warmroot.actors.models.spec import read_spec
from warmroot.actors.parallel.collectives import Collectives
from warmroot.actors.parallel.shard import Shard
from warmroot.cluster.kv_layout import KvGroup, KvLayout
from warmroot.cluster.parallel_layout import ParallelLayout
from warmroot.cluster.topology import Topology

from .greedy_harness import GreedyEngine

LIMIT_S = 60.0


class Meeting:
    """Where the threads of a group leave their tensors."""

    def __init__(self, size: int) -> None:
        self.parts: list[torch.Tensor] = [torch.empty(0)] * size
        self.barrier = threading.Barrier(size, timeout=LIMIT_S)


@dataclass
class ThreadGroup:
    """What a tensor-parallel group needs of ``Collectives``; counts its sums."""

    rank: int
    size: int
    meeting: Meeting
    num_sums: int = 0

    def all_reduce(self, x: torch.Tensor) -> None:
        assert x.is_contiguous()
        self.num_sums += 1
        parts = self._swap(x)
        x.copy_(torch.stack(parts).sum(0))

    def gather(self, x: torch.Tensor, dst: int) -> torch.Tensor | None:
        parts = self._swap(x)
        return torch.stack(parts) if self.rank == dst else None

    def _swap(self, x: torch.Tensor) -> list[torch.Tensor]:
        self.meeting.parts[self.rank] = x.clone()
        self.meeting.barrier.wait()
        parts = list(self.meeting.parts)
        self.meeting.barrier.wait()
        return parts


@dataclass(frozen=True)
class GangMemory:
    """The ranks' KV behind one face."""

    layout: KvLayout
    ranks: list[KvMemory]

    def copy_blocks(self, copies: Any) -> None:
        for memory in self.ranks:
            memory.copy_blocks(copies)


class ThreadedGang:
    """Ranks that look like one decoder: its forward hands hidden states from stage to stage."""

    def __init__(self, path: Path, topology: Topology, *, num_redundant_experts: int = 0, **options: Any) -> None:
        self.spec = read_spec(path)
        self.topology = topology
        layout = ParallelLayout.of(self.spec, topology, num_redundant_experts=num_redundant_experts)
        meetings = [Meeting(topology.tp) for _ in topology.tp_groups]
        self.groups = [
            ThreadGroup(rank % topology.tp, topology.tp, meetings[rank // topology.tp])
            for rank in topology.control_group
        ]
        solo = Shard.whole(self.spec).groups
        shards = [
            Shard(layout, rank, replace(solo, tp=cast(Collectives, group))) for rank, group in enumerate(self.groups)
        ]
        self.ranks = [load_model(path, device=torch.device("cpu"), shard=shard, **options) for shard in shards]
        self.dtype, self.device, self.backend = self.ranks[0].dtype, self.ranks[0].device, self.ranks[0].backend
        self._threads = ThreadPoolExecutor(topology.tp)

    def memory(self, layout: KvLayout, num_blocks: int) -> GangMemory:
        return GangMemory(
            layout,
            [
                KvMemory.allocate(
                    stage_layout(layout, decoder.own.layers),
                    num_blocks,
                    decoder.kv_heads,
                    decoder.spec.cache_dim,
                    decoder.dtype,
                    decoder.device,
                    decoder.backend,
                )
                for decoder in self.ranks
            ],
        )

    def forward(self, token_ids: torch.Tensor, positions: torch.Tensor, kv: Any, metadata: Any) -> torch.Tensor:
        hidden: torch.Tensor | None = None
        for stage in self.topology.stage_groups:
            previous = hidden

            def run(rank: int, previous: torch.Tensor | None = previous) -> torch.Tensor:
                if previous is None:
                    return self.ranks[rank].forward(token_ids, positions, kv.ranks[rank], metadata)
                return self.ranks[rank].forward(None, positions, kv.ranks[rank], metadata, previous.clone())

            found = self._together(stage, run)
            assert all(torch.equal(other, found[0]) for other in found)
            hidden = found[0]
        assert hidden is not None
        return hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        first, *others = self._together(self.topology.stage_groups[-1], lambda rank: self.ranks[rank].logits(hidden))
        assert first is not None
        assert others == [None] * len(others)
        return first

    def _together(self, ranks: list[int], run: Callable[[int], Any]) -> list[Any]:
        return list(self._threads.map(run, ranks))


def greedy_engine(gang: ThreadedGang, num_blocks: int, options: dict | None = None) -> GreedyEngine:
    """``GreedyEngine`` over the gang, with the ranks' own KV."""
    engine = GreedyEngine(cast(Decoder, gang), num_blocks=num_blocks, options=options or {})
    runner: Any = engine.runner
    runner._kv = gang.memory(runner.layout, num_blocks)
    return engine


def stage_layout(layout: KvLayout, layers: range) -> KvLayout:
    """The KV of a stage's layers, in the groups of the whole model."""
    groups = tuple(
        KvGroup(tuple(layer - layers.start for layer in group.layers if layer in layers), group.window)
        for group in layout.groups
    )
    return KvLayout(groups, max(len(group.layers) for group in groups), layout.block_size)
