"""Where a decoder's linears come from, and how torch's are made."""

from collections.abc import Sequence
from typing import Protocol

import torch

from ...cluster.model_tensors import EMBEDDING
from ...cluster.parallel_layout import RankLayout
from ..layers.grouped import GroupedLinear
from ..layers.linear import Linear, LinearMethod
from .tensors import OUTPUT, fused_linears
from .weights import Weights


class Linears(Protocol):
    """A model's linears and its embedding table."""

    @property
    def format(self) -> str:
        """The weights' form, for people and for the namespace of cached KV: ``float16``, ``q4_1``, ``int8`` …"""
        ...

    @property
    def table(self) -> torch.Tensor:
        """Embedding [rank's part of the vocabulary, hidden]; no rows where there is no embedding."""
        ...

    def linear(self, name: str) -> Linear:
        """One of ``fused_linears``."""
        ...


class TorchLinears:
    """Weights as the method keeps them, multiplied by torch; GPTQ's and AWQ's codes may stay what they are."""

    def __init__(
        self,
        own: RankLayout,
        weights: Weights,
        method: LinearMethod,
        table_dtype: torch.dtype,
        device: torch.device,
        *,
        name: str,
        keeps_codes: bool,
        head: LinearMethod | None = None,
    ) -> None:
        """``head`` is the method of the last linear, if it has one of its own."""
        self.format = name
        self._weights = weights
        self._method = method
        self._head = head or method
        self._modules = fused_linears(own)
        self._ties = own.has_embedding and own.spec.tie_embeddings
        self._device = device
        self._keeps_codes = keeps_codes
        self.table = take_table(weights, own).to(device, table_dtype)

    def linear(self, name: str) -> Linear:
        """See ``Linears.linear``."""
        method = self._head if name == OUTPUT else self._method
        if name == OUTPUT and self._ties:
            return method.prepare(self.table, None)
        modules = self._modules[name]
        biases = [self._weights.take_optional(module + ".bias") for module in modules]
        bias = _stack([b for b in biases if b is not None]) if biases[0] is not None else None
        grouped = self._grouped(modules, bias) if self._keeps_codes else None
        if grouped is not None:
            return grouped
        return method.prepare(_stack([self._weights.take(module + ".weight") for module in modules]), bias)

    def _grouped(self, modules: Sequence[str], bias: torch.Tensor | None) -> GroupedLinear | None:
        """None where not all of the linear's modules are stored as codes."""
        found = [self._weights.take_grouped(module + ".weight") for module in modules]
        codes = [weight for weight in found if weight is not None]
        return GroupedLinear.of(codes, bias, self._device) if len(codes) == len(found) else None


def take_table(weights: Weights, own: RankLayout) -> torch.Tensor:
    """The embedding as ``Linears.table`` wants it, in the dtype in which it is stored."""
    return weights.take(EMBEDDING) if own.has_embedding else torch.empty(0, own.spec.hidden_size)


def _stack(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(list(tensors))
