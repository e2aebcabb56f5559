"""A checkpoint's weights in the native kernels' form: what is packed how."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import torch
from gguf import GGMLQuantizationType as Storage

from ...cluster.model_spec import ModelSpec
from ...cluster.parallel_layout import RankLayout
from ...cluster.weight_formats import ON_LOAD, weights_name
from ..kernels.linear import (
    NativeLinear,
    PackedWeight,
    WeightFormat,
    pack,
    pack_gguf,
    pack_grouped,
    packable_gguf,
)
from ..layers.grouped import stacked
from .linears import take_table
from .tensors import OUTPUT, fused_linears, whole_model
from .weights import CODES, Weights, WeightSource

_FORMATS = {torch.float32: WeightFormat.F32, torch.float16: WeightFormat.F16, torch.bfloat16: WeightFormat.BF16}
_AS_STORED = {"int8": Storage.Q8_0, "int4": Storage.Q4_1}
"""Blocks that are as small as what quantising on load makes, and are kept."""
_ALL_STORAGES = tuple(int(storage) for storage in Storage)


@dataclass(frozen=True, slots=True)
class Packing:
    """How a checkpoint's linears are packed."""

    name: str
    """``Linears.format``."""
    floats: WeightFormat
    """Of tensors stored as floats."""
    blocks: WeightFormat
    """Of quantised tensors whose blocks cannot be taken as they are."""
    as_stored: frozenset[int]
    """ggml's numbers of the block formats that are taken as they are."""
    table_dtype: torch.dtype
    group: int = 32
    """Input features that share a scale in what is quantised here."""
    keeps_codes: bool = False
    """Whether linears that are stored as GPTQ or AWQ codes are taken as they are."""

    @property
    def head(self) -> "Packing":
        """Of the last linear: 4 bits on load are 8 there, as a head's errors are the logits' own."""
        if self.floats != WeightFormat.Q4:
            return self
        q8 = WeightFormat.Q8
        return replace(self, floats=q8, blocks=q8, as_stored=frozenset({int(Storage.Q8_0)}))

    @property
    def is_all_float16(self) -> bool:
        """Whether every linear is float16."""
        return self.floats == self.blocks == WeightFormat.F16 and not self.keeps_codes

    @classmethod
    def of(cls, source: WeightSource, spec: ModelSpec, quantization: str, dtype: torch.dtype | None) -> "Packing":
        """The same for all ranks of a model. ``dtype`` None is auto: float16, or GGUF's blocks as they are.

        The codes of GPTQ and AWQ are kept unless ``quantization`` asks for something else.
        """
        chosen = dtype or torch.float16
        floats, name = _FORMATS[chosen], str(chosen).removeprefix("torch.")
        config = source.quantization
        if quantization in ON_LOAD:
            made = ON_LOAD[quantization]
            own = WeightFormat.Q8 if made.bits == 8 else WeightFormat.Q4
            same = frozenset({int(_AS_STORED[quantization])} if quantization in _AS_STORED else ())
            return cls(weights_name(config, quantization, name), own, own, same, chosen, made.group)
        if config is not None:
            name, keeps = weights_name(config, quantization, name), quantization != "none"
            return cls(name, floats, floats, frozenset(), chosen, keeps_codes=keeps)
        stored = _stored_blocks(source, spec) if quantization == "auto" and dtype is None else ""
        if not stored:
            return cls(name, floats, floats, frozenset(), chosen)
        packable = frozenset(number for number in _ALL_STORAGES if packable_gguf(number))
        return cls(stored, floats, WeightFormat.Q8, packable, chosen)


@dataclass(frozen=True, slots=True)
class PackedLinears:
    """Packed weights, in memory or in a mapped file. Implements ``Linears``."""

    format: str
    table: torch.Tensor
    parts: dict[str, tuple[PackedWeight, ...]]

    def linear(self, name: str) -> NativeLinear:
        """See ``Linears.linear``."""
        return NativeLinear(self.parts[name])


def pack_table(weights: Weights, own: RankLayout, packing: Packing) -> torch.Tensor:
    """The embedding, dequantised."""
    return take_table(weights, own).to(packing.table_dtype).contiguous()


def pack_linears(weights: Weights, own: RankLayout, packing: Packing) -> Iterator[tuple[str, tuple[PackedWeight, ...]]]:
    """The linears one by one, in the order of ``fused_linears``."""
    for name, modules in fused_linears(own).items():
        yield name, _pack_linear(weights, packing.head if name == OUTPUT else packing, modules)


def _pack_linear(weights: Weights, packing: Packing, modules: tuple[str, ...]) -> tuple[PackedWeight, ...]:
    """Neighbours that are stored alike become one part."""

    def block_type(module: str) -> int | None:
        return weights.source.block_type(module + ".weight")

    runs = [(kind, list(run)) for kind, run in groupby(modules, key=block_type)]
    return tuple(part for kind, run in runs for part in _pack_alike(weights, packing, kind, run))


def _pack_alike(
    weights: Weights, packing: Packing, block_type: int | None, modules: list[str]
) -> Iterable[PackedWeight]:
    """Modules that are stored alike: codes that take their inputs in several orders are several parts."""
    if block_type != CODES or not packing.keeps_codes:
        return (_pack_run(weights, packing, block_type, modules),)
    found = (weights.take_grouped(module + ".weight") for module in modules)
    parts = stacked(weight for weight in found if weight is not None)
    bias = _bias(weights, modules)
    biases = [None] * len(parts) if bias is None else bias.split([part.shape[0] for part in parts])
    return (pack_grouped(part, own) for part, own in zip(parts, biases, strict=True))


def _bias(weights: Weights, modules: Sequence[str]) -> torch.Tensor | None:
    biases = [bias.float() for module in modules if (bias := weights.take_optional(module + ".bias")) is not None]
    return torch.cat(biases) if biases else None


def _pack_run(weights: Weights, packing: Packing, block_type: int | None, modules: list[str]) -> PackedWeight:
    names, bias = [module + ".weight" for module in modules], _bias(weights, modules)
    if block_type is not None and block_type in packing.as_stored:
        blocks = [found for name in names if (found := weights.take_blocks(name)) is not None]
        if len(blocks) == len(names):
            packed = pack_gguf(torch.cat(blocks), block_type, weights.shape(names[0])[1], bias)
            if packed is not None:
                return packed
    weight = torch.cat([weights.take(name) for name in names])
    return pack(weight, packing.floats if block_type is None else packing.blocks, bias, packing.group)


def _stored_blocks(source: WeightSource, spec: ModelSpec) -> str:
    """``q4_1+q8_0``: the block formats of the linears, the commonest first; empty where all are floats."""
    kinds = Counter(
        source.block_type(module + ".weight")
        for modules in fused_linears(whole_model(spec)).values()
        for module in modules
    )
    return "+".join(Storage(kind).name.lower() for kind, _ in kinds.most_common() if kind is not None)
