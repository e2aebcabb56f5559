"""AWQ's scales in a layer: columns are multiplied, and what makes those inputs is divided."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Literal

import torch

from ..layers.norm import RMSNorm
from ..models.decoder import Decoder
from ..models.tensors import layer_prefix
from .awq import InputMoments, awq_scales, shared_size
from .settings import QuantizeSettings
from .watched import WatchedLinear


class Folding:
    """The scales of a dense layer's ``linears``, by the last part of their names."""

    def __init__(self, decoder: Decoder, index: int, linears: Mapping[str, WatchedLinear]) -> None:
        self._decoder = decoder
        self._index = index
        self._linears = linears
        self._floats: dict[str, torch.Tensor] = {}

    def fold(self, kind: str, moments: InputMoments, settings: QuantizeSettings) -> torch.Tensor:
        """Choose the scales [in] of a linear and fold them into it and its predecessor."""
        spec, linear = self._decoder.spec, self._linears[kind]
        if kind == "o_proj":
            moments = replace(moments, size=shared_size(moments.size, spec.num_kv_heads, spec.head_dim))
        scales = awq_scales(linear.weight, moments, settings)
        linear.weight = linear.weight * scales
        if kind == "qkv_proj":
            self._divide_norm("attention_norm", "input_layernorm", scales)
        elif kind == "gate_up_proj":
            after_attention = "pre_feedforward_layernorm" if spec.sandwich_norms else "post_attention_layernorm"
            self._divide_norm("mlp_norm", after_attention, scales)
        elif kind == "o_proj":
            of_values = scales.view(spec.num_kv_heads, -1, spec.head_dim)[:, 0].flatten()
            self._divide_last_rows("qkv_proj", of_values)
        else:
            self._divide_last_rows("gate_up_proj", scales)
        return scales

    def floats(self) -> dict[str, torch.Tensor]:
        """The norms and biases that have changed, by tensor, as the checkpoint holds them."""
        return self._floats

    def _divide_norm(self, field: Literal["attention_norm", "mlp_norm"], name: str, scales: torch.Tensor) -> None:
        spec, layers = self._decoder.spec, self._decoder.layers
        weight = getattr(layers[self._index], field).weight / scales
        layers[self._index] = replace(layers[self._index], **{field: RMSNorm(weight, spec.norm_eps)})
        tensor = f"{layer_prefix(self._index)}{name}.weight"
        self._floats[tensor] = weight - 1.0 if spec.norm_plus_one else weight

    def _divide_last_rows(self, kind: str, scales: torch.Tensor) -> None:
        """Of the linear's last module: values are the last of query, key and value, up is the last of gate and up."""
        linear = self._linears[kind]
        linear.weight[-len(scales) :] /= scales[:, None]
        if linear.bias is not None:
            linear.bias[-len(scales) :] /= scales
            self._floats[f"{linear.modules[-1]}.bias"] = linear.bias[-len(scales) :].clone()
