"""Keeps the load of an expert parallel group even while it serves: hot experts get copies on other ranks.

Every rank comes to the same plan from the same counts, so nothing but counts and weights is sent. Layers are looked at
one at a time, between two steps, so that no step waits long.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from ...cluster.errors import ConfigError
from ...cluster.expert_balance import ExpertBalance, ExpertLoads
from ...cluster.expert_moves import ExpertMove, Rebalance, plan_rebalance
from ..kernels.linear import NativeLinear
from ..kernels.tuning import ChoosingLinear
from ..parallel.collectives import Collectives
from .grouped import GroupedLinear
from .linear import DenseLinear, Linear
from .mlp import GatedMLP
from .moe import MoeMLP

_MIN_CHOICES = 32
"""Tokens an expert, on average: with fewer, chance alone moves an even load by more than a sixth."""


class ExpertBalancer:
    """Balances the sparse layers of a rank, all of which are placed over the ranks of ``ep``.

    A step's load weighs half after ``half_life`` steps. Nothing is moved before there are as many tokens in the counts
    that chance does not look like load.
    """

    def __init__(
        self, layers: Mapping[int, MoeMLP], ep: Collectives, *, period: int = 16, half_life: float = 1024.0
    ) -> None:
        """``layers`` by their numbers in the model, all with one placement. Raises ConfigError for experts of a form
        that cannot be sent.
        """
        self._numbers = tuple(layers)
        self._layers = tuple(layers.values())
        self._start = self._layers[0].placement
        self._ep = ep
        self._period = period
        self._loads = ExpertLoads(len(layers), self._start.num_experts, half_life)
        self._num_steps = 0
        self._balances: dict[int, ExpertBalance] = {}
        for layer in self._layers:
            _mlp_tensors(layer.mlps[0])

    @property
    def balances(self) -> tuple[ExpertBalance, ...]:
        """Of the layers that have been looked at. May be asked for from any thread."""
        return tuple(dict(self._balances).values())

    def after_step(self) -> Rebalance | None:
        """Look at the next layer, every ``period`` steps; what was done to it. All ranks call it after every step."""
        self._num_steps += 1
        turn, rest = divmod(self._num_steps, self._period)
        return self.balance(turn % len(self._layers)) if rest == 0 else None

    def balance(self, index: int) -> Rebalance | None:
        """Place one layer's experts by the loads so far, if that is worth it. All ranks call it together."""
        layer = self._layers[index]
        counts = self._ep.all_gather(torch.from_numpy(layer.take_loads()).to(layer.device)).sum(0)
        self._loads.record(index, counts.tolist(), steps=self._period * len(self._layers))
        loads = self._loads.loads(index)
        is_enough = sum(loads) >= _MIN_CHOICES * len(loads)
        plan = plan_rebalance(layer.placement, loads) if is_enough else None
        if plan is not None:
            layer.place(plan.placement, move_experts(plan.moves, layer.mlps, self._ep))
        self._note(index, loads, 0 if plan is None else sum(move.source != move.target for move in plan.moves))
        return plan

    def _note(self, index: int, loads: Sequence[float], num_moves: int) -> None:
        before = self._balances.get(index)
        self._balances[index] = ExpertBalance(
            layer=self._numbers[index],
            loads=tuple(loads),
            imbalance_at_start=self._start.imbalance(loads),
            imbalance=self._layers[index].placement.imbalance(loads),
            num_moves=num_moves + (0 if before is None else before.num_moves),
        )


def move_experts(moves: Sequence[ExpertMove], mlps: Sequence[GatedMLP], ep: Collectives) -> list[GatedMLP]:
    """The MLPs of the rank's slots after ``moves``, in one all-to-all; those that stay are the same objects.

    All experts have one form and size. Raises ConfigError for linears that cannot be sent.
    """
    # all_to_all wants rows by target, and gives them by source; where both are equal, the moves' order decides.
    sent = sorted((move for move in moves if move.source == ep.rank), key=lambda move: move.target)
    fetched = sorted((move for move in moves if move.target == ep.rank), key=lambda move: move.source)
    size = sum(tensor.nbytes for tensor in _mlp_tensors(mlps[0]))
    device = _mlp_tensors(mlps[0])[0].device
    rows = torch.empty(len(sent), size, dtype=torch.uint8, device=device)
    for row, move in zip(rows, sent, strict=True):
        torch.cat([_as_bytes(tensor) for tensor in _mlp_tensors(mlps[move.source_slot])], out=row)
    arrived = torch.empty(len(fetched), size, dtype=torch.uint8, device=device)
    send_counts = [sum(move.target == rank for move in sent) for rank in range(ep.size)]
    ep.all_to_all(
        rows, send_counts, arrived, [sum(move.source == rank for move in fetched) for rank in range(ep.size)]
    ).wait()
    after = list(mlps)
    for row, move in zip(arrived, fetched, strict=True):
        after[move.target_slot] = _mlp_like(mlps[0], row)
    return after


def _mlp_tensors(mlp: GatedMLP) -> list[torch.Tensor]:
    return _tensors(mlp.gate_up) + _tensors(mlp.down)


def _tensors(linear: Linear) -> list[torch.Tensor]:
    """All that a linear holds."""
    linear = _movable(linear)
    if isinstance(linear, DenseLinear):
        found = [linear.weight, linear.bias]
    elif isinstance(linear, GroupedLinear):
        return linear.tensors
    else:
        found = [tensor for part in linear.parts for tensor in (part.data, part.bias, part.order)]
    return [tensor for tensor in found if tensor is not None]


def _mlp_like(like: GatedMLP, row: torch.Tensor) -> GatedMLP:
    """An expert of the form of ``like``, out of its bytes."""
    # Copies of their own: they start where kernels want them to, and do not keep the other rows.
    fresh = [
        part.clone().view(tensor.dtype).view(tensor.shape)
        for tensor, part in zip(
            _mlp_tensors(like), row.split([tensor.nbytes for tensor in _mlp_tensors(like)]), strict=True
        )
    ]
    num_first = len(_tensors(like.gate_up))
    return GatedMLP(_like(like.gate_up, fresh[:num_first]), _like(like.down, fresh[num_first:]), like.activation)


def _like(linear: Linear, tensors: Sequence[torch.Tensor]) -> Linear:
    """A linear of the form of ``linear`` that holds ``tensors``."""
    linear, rest = _movable(linear), iter(tensors)
    if isinstance(linear, DenseLinear):
        return DenseLinear(next(rest), None if linear.bias is None else next(rest))
    if isinstance(linear, GroupedLinear):
        return linear.with_tensors(rest)
    return NativeLinear(
        tuple(
            replace(
                part,
                data=next(rest),
                bias=None if part.bias is None else next(rest),
                order=None if part.order is None else next(rest),
            )
            for part in linear.parts
        )
    )


def _movable(linear: Linear) -> DenseLinear | NativeLinear | GroupedLinear:
    if isinstance(linear, ChoosingLinear):
        linear = linear.own  # what arrives is packed for the own kernels only
    if not isinstance(linear, DenseLinear | NativeLinear | GroupedLinear):
        raise ConfigError(f"experts of {type(linear).__name__} cannot be sent to other ranks")
    return linear


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)
