"""Sparse layers of a decoder: how the block is put together."""

from dataclasses import dataclass

import torch

from ...cluster.expert_placement import ExpertPlacement
from ...cluster.model_spec import ModelSpec, MoeSpec
from ...cluster.model_tensors import expert_tensors, layer_tensors
from ..kernels.linear import NativeMethod, WeightFormat
from ..layers.linear import DenseMethod, Linear
from ..layers.mlp import GatedMLP
from ..layers.moe import MoeMLP, SharedExpert
from ..layers.moe_dispatch import Dispatch
from ..layers.moe_router import Router
from .linears import Linears
from .tensors import SHARED_EXPERTS
from .weights import Weights


@dataclass(frozen=True, slots=True, kw_only=True)
class SparseBuilder:
    """Makes a rank's sparse MLPs. ``linears`` and ``weights`` give the rank's part of each tensor."""

    spec: ModelSpec
    moe: MoeSpec
    weights: Weights
    linears: Linears
    placement: ExpertPlacement
    ep_rank: int
    dispatch: Dispatch
    device: torch.device

    def mlp(self, layer: int) -> MoeMLP:
        """The block of a sparse layer, experts as placed at the start."""
        return MoeMLP(
            self._router(layer),
            self.placement,
            self.ep_rank,
            [self.expert(layer, expert) for expert in self.placement.slots[self.ep_rank]],
            self._shared(layer),
            self.dispatch,
            device=self.device,
        )

    def expert(self, layer: int, expert: int) -> GatedMLP:
        """One routed expert."""
        return self._gated(next(iter(expert_tensors(self.spec, layer, expert))))

    def _router(self, layer: int) -> Router:
        gate = self._named(layer, ".gate.weight")
        correction = self._named(layer, ".gate.e_score_correction_bias")
        bias = self.weights.take(correction).to(self.device, torch.float32) if correction else None
        return Router(self.moe, self._exact(gate), bias)

    def _shared(self, layer: int) -> SharedExpert | None:
        first = self._named(layer, *(f"{part}gate_proj.weight" for part in SHARED_EXPERTS))
        if not first:
            return None
        gate = self._named(layer, ".shared_expert_gate.weight")
        return SharedExpert(self._gated(first), self._exact(gate) if gate else None)

    def _gated(self, gate: str) -> GatedMLP:
        """The MLP whose gate's weight has this name."""
        prefix = gate.removesuffix(".weight").rpartition(".")[0]
        linear = self.linears.linear
        return GatedMLP(linear(f"{prefix}.gate_up_proj"), linear(f"{prefix}.down_proj"), self.spec.activation)

    def _exact(self, name: str) -> Linear:
        """A gate: a rounded score may choose another expert."""
        native = self.device.type == "cpu" and NativeMethod.is_available()
        method = NativeMethod(WeightFormat.F32) if native else DenseMethod(torch.float32, self.device)
        return method.prepare(self.weights.take(name), None)

    def _named(self, layer: int, *endings: str) -> str:
        """The layer's tensor with one of these endings; empty if there is none."""
        return next((name for name in layer_tensors(self.spec, layer) if name.endswith(endings)), "")
