"""The feed-forward block of mixtures of experts: router, routed experts, shared experts."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from ...cluster.expert_placement import ExpertPlacement
from .linear import Linear
from .mlp import GatedMLP
from .moe_dispatch import Dispatch
from .moe_experts import ExpertWork, RankExperts
from .moe_router import Router, steady_sigmoid


@dataclass(frozen=True, slots=True)
class SharedExpert:
    """The MLP that every token passes, times sigmoid(gate(x)) if there is a ``gate`` [1, hidden] (Qwen2-MoE)."""

    mlp: GatedMLP
    gate: Linear | None = None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[T, hidden] -> [T, hidden]."""
        out = self.mlp(x)
        return out if self.gate is None else out * steady_sigmoid(self.gate.apply(x)).to(out.dtype)


class MoeMLP:
    """What a rank does of a sparse layer's MLP. All ranks of its tp group call it with the same tokens.

    ``mlps`` are those of the rank's slots in ``placement``, as much of each as the rank holds.
    """

    def __init__(
        self,
        router: Router,
        placement: ExpertPlacement,
        ep_rank: int,
        mlps: Sequence[GatedMLP],
        shared: SharedExpert | None,
        dispatch: Dispatch,
        *,
        device: torch.device,
    ) -> None:
        self._router = router
        self._ep_rank = ep_rank
        self._shared = shared
        self._dispatch = dispatch
        self.device = device
        self._loads = np.zeros(placement.num_experts, np.int64)
        self._work = ExpertWork()
        self.place(placement, mlps)

    def place(self, placement: ExpertPlacement, mlps: Sequence[GatedMLP]) -> None:
        """Use another placement from the next call on; all ranks of the ep group must do so between the same calls."""
        self.placement = placement
        self._experts = RankExperts(
            mlps,
            self._ep_rank * placement.slots_per_rank,
            placement.num_ranks * placement.slots_per_rank,
            self._work,
        )
        self._turn_table = torch.tensor(placement.turn_table(), device=self.device)

    @property
    def num_rows(self) -> int:
        """Rows that the rank's experts have computed so far."""
        return self._work.num_rows

    @property
    def mlps(self) -> Sequence[GatedMLP]:
        """In the rank's slots."""
        return self._experts.mlps

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[T, hidden] -> [T, hidden]: the rank's part, to be summed over the tp group."""
        share = self._dispatch.share(len(x))
        rows = x[share]
        experts, weights = self._router(rows)
        self._loads += np.bincount(experts.flatten().cpu().numpy(), minlength=len(self._loads))
        finish = self._dispatch.start(self._experts, rows, self._copies(experts), weights)
        # Between start and finish the tokens are on their way.
        shared = None if self._shared is None else self._shared(x)
        routed = finish()
        if shared is None and len(rows) == len(x):
            return routed
        out = torch.zeros_like(x) if shared is None else shared
        out[share] += routed
        return out

    def take_loads(self) -> npt.NDArray[np.int64]:
        """[num_experts] tokens that chose each expert since the last call, of those that the rank looked after.

        The ranks of a tp group count all the same tokens (``LocalDispatch``) or their shares (``TokenExchange``).
        """
        loads = self._loads
        self._loads = np.zeros_like(loads)
        return loads

    def _copies(self, experts: torch.Tensor) -> torch.Tensor:
        """[T, k] experts -> the copies that the tokens go to, round robin."""
        first = self._dispatch.first_turn
        turns = torch.arange(first, first + len(experts), device=self.device) % self._turn_table.shape[1]
        return self._turn_table[experts, turns[:, None]]
