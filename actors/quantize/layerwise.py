"""Layer after layer: its inputs come from layers that are quantised already, so that each makes up for those before."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from ...cluster.errors import ConfigError
from ...cluster.model_spec import ModelSpec
from ..attention import make_backend
from ..models.decoder import Decoder
from ..models.gguf_source import GgufSource
from ..models.safetensors_source import SafetensorsSource
from ..models.spec import is_gguf, read_quantization, read_spec
from ..models.tensors import layer_prefix, wanted_shapes
from ..models.weights import Weights, WeightSource
from ..parallel.shard import Shard
from .awq import awq_round
from .folding import Folding
from .gptq import gptq
from .grid import grouped, whole_range
from .quantised import QuantisedLinear, output_error, round_to_grid
from .settings import QuantizeSettings
from .stream import CalibrationStream
from .watched import WatchedLinear, WatchedLinears

_STAGES = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")
"""In the order in which they compute; linears of one stage do not feed each other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantisedLayer:
    """What has become of a layer."""

    index: int
    num_layers: int
    linears: dict[str, QuantisedLinear]
    """By module."""
    floats: dict[str, torch.Tensor]
    """Norms and biases that scales were folded into, by tensor."""
    errors: dict[str, float]
    """By linear: squared error of its outputs on the calibration text over their squares; of its weights for rtn."""


class Layerwise:
    """A model on its way to a checkpoint. At any time one layer's weights are in memory.

    Raises ModelLoadError, and ConfigError for a model that the settings do not fit.
    """

    def __init__(self, path: Path, settings: QuantizeSettings) -> None:
        spec = read_spec(path)
        _check_model(path, spec, settings)
        shard, device = Shard.whole(spec), torch.device("cpu")
        source: WeightSource = GgufSource(path) if is_gguf(path) else SafetensorsSource(path)
        self._tensors = tuple(wanted_shapes(shard.own))
        self._weights = Weights(source, wanted_shapes(shard.own))
        self._settings = settings
        self._linears = WatchedLinears(shard.own, self._weights)
        backend = make_backend(device, torch.float32)
        self._decoder = Decoder(shard, self._weights, self._linears, backend, dtype=torch.float32, device=device)
        for linear in self._linears.under("model.layers."):
            for module, size in zip(linear.modules, linear.sizes, strict=True):
                settings.check_shape(module, size, linear.in_features)

    @property
    def spec(self) -> ModelSpec:
        """Of the model."""
        return self._decoder.spec

    @property
    def tensors(self) -> tuple[str, ...]:
        """Names of all that the model has."""
        return self._tensors

    @property
    def modules(self) -> list[str]:
        """All that are to be quantised."""
        return [module for linear in self._linears.under("model.layers.") for module in linear.modules]

    def read(self, name: str) -> torch.Tensor:
        """A tensor as it is in the model."""
        return self._weights.take(name)

    @torch.inference_mode()
    def run(self, samples: Sequence[Sequence[int]] = ()) -> Iterator[QuantisedLayer]:
        """Quantise layer by layer; ``samples`` are calibration texts as token ids of one length (rtn needs none)."""
        stream = CalibrationStream(self._decoder, samples) if self._settings.needs_inputs else None
        for index in range(self.spec.num_layers):
            linears = self._linears.under(layer_prefix(index))
            for linear in linears:
                linear.load()
            if stream is None:
                yield self._round(index, linears)
            elif self._settings.method == "gptq":
                yield self._gptq(index, linears, stream)
            else:
                yield self._awq(index, linears, stream)
            for linear in linears:
                linear.unload()

    def _nothing(self, index: int) -> QuantisedLayer:
        return QuantisedLayer(index=index, num_layers=self.spec.num_layers, linears={}, floats={}, errors={})

    def _round(self, index: int, linears: list[WatchedLinear]) -> QuantisedLayer:
        result = self._nothing(index)
        for linear in linears:
            size = self._settings.group_of(linear.in_features)
            # Which weights may be clipped only the inputs could tell.
            groups = grouped(linear.weight, size)
            grid = whole_range(groups, self._settings.max_code, symmetric=self._settings.symmetric)
            _put(result, linear, round_to_grid(linear.weight, grid, size), None)
        return result

    def _gptq(self, index: int, linears: list[WatchedLinear], stream: CalibrationStream) -> QuantisedLayer:
        result = self._nothing(index)
        for linear in linears:
            linear.is_silent = True
        for kind in _STAGES:
            stage = [linear for linear in linears if linear.kind == kind]
            for linear in stage:
                linear.watch()
            stream.look(index)
            for linear in stage:
                gram = linear.take_moments().gram
                _put(result, linear, gptq(linear.weight, gram, self._settings), gram)
                linear.is_silent = False
        stream.advance(index)
        return result

    def _awq(self, index: int, linears: list[WatchedLinear], stream: CalibrationStream) -> QuantisedLayer:
        result = self._nothing(index)
        by_kind = {linear.kind: linear for linear in linears}
        for linear in linears:
            linear.watch()
        stream.look(index)
        folding = Folding(self._decoder, index, by_kind)
        grams: dict[str, torch.Tensor] = {}
        for kind in _STAGES:
            moments = by_kind[kind].take_moments()
            scales = folding.fold(kind, moments, self._settings)
            grams[kind] = moments.gram / (scales * scales[:, None])
        for kind, linear in by_kind.items():
            _put(result, linear, awq_round(linear.weight, grams[kind], self._settings), grams[kind])
        result.floats.update(folding.floats())
        stream.advance(index)
        return result


def _put(result: QuantisedLayer, linear: WatchedLinear, found: QuantisedLinear, gram: torch.Tensor | None) -> None:
    """Note what was found, and let the layer compute with it."""
    weight = found.weight()
    result.errors[linear.name] = _relative_error(weight, linear.weight, gram)
    linear.weight = weight
    begin = 0
    for module, size in zip(linear.modules, linear.sizes, strict=True):
        result.linears[module] = found.rows(begin, begin + size)
        begin += size


def _relative_error(weight: torch.Tensor, wanted: torch.Tensor, gram: torch.Tensor | None) -> float:
    if gram is None:
        return float((weight - wanted).square().sum() / wanted.square().sum().clamp_(min=1e-30))
    return output_error(weight - wanted, gram) / max(output_error(wanted, gram), 1e-30)


def _check_model(path: Path, spec: ModelSpec, settings: QuantizeSettings) -> None:
    stored = read_quantization(path)
    if stored is not None:
        raise ConfigError(f"model: {path} is quantised already ({stored.name}); give its original", param="model")
    if spec.mla is not None:
        raise ConfigError(f"model: {spec.architecture} has latent attention, which is not quantised", param="model")
    if spec.moe is not None and settings.method == "awq":
        raise ConfigError("--method: awq is for dense models; use gptq or rtn for experts", param="method")
