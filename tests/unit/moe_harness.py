"""Sparse layers of random weights, cut for ranks that are threads."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from warmroot.actors.layers.linear import DenseMethod, Linear, LinearMethod
from warmroot.actors.layers.mlp import GatedMLP
from warmroot.actors.layers.moe import MoeMLP, SharedExpert
from warmroot.actors.layers.moe_dispatch import LocalDispatch, TokenExchange
from warmroot.actors.layers.moe_router import Router
from warmroot.actors.parallel.collectives import Collectives
from warmroot.actors.parallel.solo import SoloGroup
from warmroot.cluster.expert_placement import ExpertPlacement, initial_placement
from warmroot.cluster.model_spec import MoeSpec
from warmroot.cluster.splits import split_evenly
from warmroot.cluster.topology import Topology

CPU = torch.device("cpu")
FLOATS = DenseMethod(torch.float32, CPU)
SOLO = Topology()
LIMIT_S = 30.0


@dataclass(frozen=True)
class RowByRow:
    """Multiplies every row on its own: what it gives cannot depend on the batch. A method and its linear."""

    weight: torch.Tensor | None = None

    def prepare(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
        return RowByRow(weight)

    def apply(self, x: torch.Tensor) -> torch.Tensor:
        assert self.weight is not None
        return torch.stack([F.linear(row, self.weight) for row in x]) if len(x) else x.new_empty(0, len(self.weight))


def moe_spec(**values) -> MoeSpec:
    values = {"num_experts": 8, "experts_per_token": 2, "intermediate_size": 16, "sparse_layers": (True,)} | values
    return MoeSpec(**values)


@dataclass(frozen=True)
class Block:
    """The whole weights of one sparse layer. Gate and up stand stacked, as in transformers."""

    moe: MoeSpec
    gate: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor
    correction: torch.Tensor | None = None
    shared_gate_up: torch.Tensor | None = None
    shared_down: torch.Tensor | None = None
    shared_gate: torch.Tensor | None = None

    @classmethod
    def random(cls, moe: MoeSpec, hidden: int = 24, seed: int = 0) -> "Block":
        generator = torch.Generator().manual_seed(seed)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator) * shape[-1] ** -0.5

        inner, shared = moe.intermediate_size, moe.shared_intermediate_size
        return cls(
            moe=moe,
            gate=4 * normal(moe.num_experts, hidden),
            gate_up=normal(moe.num_experts, 2 * inner, hidden),
            down=normal(moe.num_experts, hidden, inner),
            correction=0.1 * normal(moe.num_experts) if moe.correction_bias else None,
            shared_gate_up=normal(2 * shared, hidden) if shared else None,
            shared_down=normal(hidden, shared) if shared else None,
            shared_gate=normal(1, hidden) if moe.shared_gate else None,
        )

    def router(self, method: LinearMethod = FLOATS) -> Router:
        return Router(self.moe, method.prepare(self.gate, None), self.correction)

    def expert(self, expert: int, part: int = 0, parts: int = 1, method: LinearMethod = FLOATS) -> GatedMLP:
        return _mlp(self.gate_up[expert], self.down[expert], part, parts, method)

    def rank(
        self,
        topology: Topology = SOLO,
        rank: int = 0,
        ep: Collectives | None = None,
        placement: ExpertPlacement | None = None,
        method: LinearMethod = FLOATS,
    ) -> MoeMLP:
        """What one rank of ``topology`` holds, with the placement of the start by default."""
        placement = placement or initial_placement(self.moe.num_experts, topology.ep)
        shared, place = None, topology.place(rank)
        if self.shared_gate_up is not None and self.shared_down is not None:
            mlp = _mlp(self.shared_gate_up, self.shared_down, place.tp_rank, topology.tp, method)
            shared = SharedExpert(mlp, None if self.shared_gate is None else method.prepare(self.shared_gate, None))
        return MoeMLP(
            self.router(method),
            placement,
            place.ep_rank,
            self.held(placement, topology, rank, method),
            shared,
            TokenExchange(ep or SoloGroup(), tp=topology.tp) if topology.exchanges_tokens else LocalDispatch(),
            device=CPU,
        )

    def held(
        self, placement: ExpertPlacement, topology: Topology, rank: int, method: LinearMethod = FLOATS
    ) -> list[GatedMLP]:
        place = topology.place(rank)
        experts = placement.slots[place.ep_rank]
        return [self.expert(expert, place.expert_tp_rank, topology.expert_tp, method) for expert in experts]

    def reference(self, x: torch.Tensor) -> torch.Tensor:
        """Token by token in float64; only the router is the one under test."""
        experts, weights = self.router()(x)
        rows = []
        for token, chosen, shares in zip(x.double(), experts.tolist(), weights.tolist(), strict=True):
            row = torch.zeros_like(token)
            for expert, weight in zip(chosen, shares, strict=True):
                row += weight * _gated(token, self.gate_up[expert], self.down[expert])
            if self.shared_gate_up is not None and self.shared_down is not None:
                shared = _gated(token, self.shared_gate_up, self.shared_down)
                row += shared if self.shared_gate is None else shared * (self.shared_gate.double() @ token).sigmoid()
            rows.append(row)
        return torch.stack(rows).to(x.dtype) if rows else torch.empty_like(x)


def _mlp(gate_up: torch.Tensor, down: torch.Tensor, part: int, parts: int, method: LinearMethod) -> GatedMLP:
    columns = split_evenly(down.shape[1], parts)[part]
    inner = slice(columns.start, columns.stop)
    own = gate_up.unflatten(0, (2, -1))[:, inner].flatten(0, 1)
    return GatedMLP(method.prepare(own, None), method.prepare(down[:, inner], None), "silu")


def _gated(token: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    gate, up = (gate_up.double() @ token).chunk(2)
    return down.double() @ (F.silu(gate) * up)


def tokens(count: int, hidden: int = 24, seed: int = 1) -> torch.Tensor:
    return torch.randn(count, hidden, generator=torch.Generator().manual_seed(seed))


class Board:
    """Where the ranks of a group, which are threads, leave things for each other."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.barrier = threading.Barrier(size, timeout=LIMIT_S)
        self._left: list[object] = [None] * size

    def swap(self, rank: int, thing: object) -> list:
        """Leave a thing; what all ranks have left."""
        self._left[rank] = thing
        self.barrier.wait()
        everything = list(self._left)
        self.barrier.wait()
        return everything


class ThreadGroup(SoloGroup):
    """What layers use of ``Collectives``, between threads. ``log`` has what happened, in order."""

    def __init__(self, board: Board, rank: int) -> None:
        self.board = board
        self.rank = rank
        self.size = board.size
        self.log: list[str] = []
        self.received: list[list[int]] = []
        """Of each all-to-all, the rows from each rank."""

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack(self.board.swap(self.rank, x.clone()))

    def exchange_counts(self, counts: Sequence[int]) -> list[int]:
        self.log.append("counts")
        return [theirs[self.rank] for theirs in self.board.swap(self.rank, list(counts))]

    def all_to_all(
        self, rows: torch.Tensor, send_counts: Sequence[int], out: torch.Tensor, recv_counts: Sequence[int]
    ) -> "ThreadPending":
        assert rows.is_contiguous() and out.is_contiguous()
        assert (len(rows), len(out)) == (sum(send_counts), sum(recv_counts))
        self.log.append("start")
        self.received.append(list(recv_counts))
        return ThreadPending(self, rows.split(list(send_counts)), out)


@dataclass(frozen=True)
class ThreadPending:
    group: ThreadGroup
    parts: Sequence[torch.Tensor]
    out: torch.Tensor

    def wait(self) -> None:
        self.group.log.append("wait")
        theirs = self.group.board.swap(self.group.rank, self.parts)
        self.out.copy_(torch.cat([parts[self.group.rank] for parts in theirs]))


def run_ranks(size: int, body: Callable[[int, ThreadGroup], object]) -> list:
    """``body(rank, group)`` in a thread each; their results, in order."""
    board = Board(size)

    def run(rank: int) -> object:
        try:
            return body(rank, ThreadGroup(board, rank))
        except BaseException:
            board.barrier.abort()  # the others must not wait for this rank
            raise

    with ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(run, rank) for rank in range(size)]
    errors = [error for future in futures if (error := future.exception()) is not None]
    for error in sorted(errors, key=lambda error: isinstance(error, threading.BrokenBarrierError)):
        raise error
    return [future.result() for future in futures]
