"""What weights cost: in GGUF's blocks, in the panels of the CPU kernels, and as plain floats.

Quantised weights are integers whose groups of columns share a scale.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from .model_tensors import EMBEDDING, HEAD
from .quantization_config import QuantizationConfig

_FLOAT32_BYTES = 4
_PANEL = 16
"""Rows that the CPU kernels keep together (``native/linear.h``)."""
_WHOLE_ROW = 1 << 30
"""A group that no row exceeds."""
_LINE = 64
"""Quantised panels begin at multiples of so many bytes."""


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """``bits`` per weight and, for each ``group`` of weights of a row, ``group_bytes`` of scales (group 1: none)."""

    name: str
    bits: int
    group: int = 1
    group_bytes: int = 0
    panel: int = 1
    """Rows are filled up to a multiple of this."""

    @property
    def is_quantised(self) -> bool:
        """Whether weights are integers with scales."""
        return self.group > 1

    def matrix_bytes(self, rows: int, columns: int) -> int:
        """Bytes of [rows, columns] weights."""
        groups = -(-columns // self.group) if self.is_quantised else 0
        panel_bytes = self.panel * (-(-columns * self.bits // 8) + groups * self.group_bytes)
        if self.is_quantised and self.panel > 1:
            panel_bytes = -(-panel_bytes // _LINE) * _LINE
        return -(-rows // self.panel) * panel_bytes


WEIGHT_FORMATS: dict[str, WeightFormat] = {
    fmt.name: fmt
    for fmt in (
        WeightFormat("float32", 32),
        WeightFormat("float16", 16),
        WeightFormat("bfloat16", 16),
        WeightFormat("q8_0", 8, 32, 2),
        WeightFormat("q5_0", 5, 32, 2),
        WeightFormat("q4_0", 4, 32, 2),
        WeightFormat("q4_1", 4, 32, 4),
        WeightFormat("q6_k", 6, 256, 18),
        WeightFormat("q5_k", 5, 256, 16),
        WeightFormat("q4_k", 4, 256, 16),
    )
}
"""Names and sizes of GGUF's blocks."""

_INT8 = WeightFormat("int8", 8, 32, 2, _PANEL)
_INT4 = WeightFormat("q4_0", 4, 32, 2, _PANEL)
_INT4_WITH_MINIMUM = WeightFormat("q4_1", 4, 32, 4, _PANEL)
ON_LOAD: dict[str, WeightFormat] = {
    "int8": WeightFormat("int8", 8, 32, 2),
    "int4": WeightFormat("int4", 4, 32, 3),
    "int4-g64": WeightFormat("int4-g64", 4, 64, 3),
    "int4-g128": WeightFormat("int4-g128", 4, 128, 3),
}
"""What linears may be quantised to when they are loaded, with the groups that get one scale. The head gets 8 bits."""
_PACKED = {
    "float32": WeightFormat("float32", 32, panel=_PANEL),
    "float16": WeightFormat("float16", 16, panel=_PANEL),
    "bfloat16": WeightFormat("bfloat16", 16, panel=_PANEL),
    "q4_0": _INT4,
    "q4_1": _INT4_WITH_MINIMUM,
    "q4_k": _INT4_WITH_MINIMUM,
}


def _made(on_load: str) -> WeightFormat:
    """What the CPU kernels make of weights."""
    return _INT8 if ON_LOAD[on_load].bits == 8 else replace(_INT4_WITH_MINIMUM, name=on_load)


def _heads(fmt: WeightFormat | None) -> dict[str, WeightFormat]:
    return {} if fmt is None else dict.fromkeys((EMBEDDING, HEAD), fmt)


def packed_format(stored: str) -> WeightFormat:
    """What the CPU kernels keep weights as that are stored so: blocks without a form of their own take 8 bits."""
    return _PACKED.get(stored, _INT8)


def grouped_format(config: QuantizationConfig | None) -> WeightFormat | None:
    """What the CPU kernels keep GPTQ's and AWQ's codes as: a scale per 32 input features, and a zero if any has one."""
    if config is None:
        return None
    return WeightFormat(config.name, config.bits, 32, 4 if config.has_zeros else 2, _PANEL)


def weights_name(config: QuantizationConfig | None, quantization: str, dtype: str) -> str:
    """What weights are that became what ``quantization`` asks for, beside floats of a dtype.

    Other names stand for other outputs: they are part of the namespace of cached KV.
    """
    made = quantization if quantization in ON_LOAD else dtype
    if config is None:
        return made
    return config.name_as(made) if quantization in ("none", *ON_LOAD) else config.name_beside(dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptWeights:
    """What a device keeps each kind of weight as. Norms and biases are float32."""

    name: str
    """For people: what the checkpoint's linears are stored as, the commonest first, or what they all become."""
    linears: WeightFormat
    table: WeightFormat
    """Of the embedding."""
    gates: WeightFormat
    """Routers, and gates of shared experts."""
    latents: WeightFormat
    """What MLA makes keys and values of heads with: kept as activations are, and read in two parts."""
    exceptions: Mapping[str, WeightFormat] = field(default_factory=dict[str, WeightFormat])
    """Linears that are kept as something else, by the names of their weights."""
    is_copied: bool = False
    """Whether linears but experts may have a second copy, in another library's form, for the numbers of rows where that
    is faster. The machine finds out when it loads."""
    ties_head: bool
    """Whether the head of a model with tied embeddings is the table itself; else it is a linear beside it."""

    @classmethod
    def packed(cls, dtype: str, stored: Mapping[str, str] | None = None, *, on_load: str = "") -> "KeptWeights":
        """On a CPU: linears in panels. ``stored``: the formats of a GGUF file's linears, taken as they are.

        ``dtype`` is that of floats and of the table; every linear becomes what ``on_load`` names in ``ON_LOAD``.
        """
        kinds = {} if on_load or stored is None else dict(stored)
        names = [name for name, _ in Counter(kinds.values()).most_common()] or [on_load or dtype]
        return cls(
            name="+".join(names),
            linears=_made(on_load) if on_load else _PACKED[dtype],
            table=WEIGHT_FORMATS[dtype],
            gates=_PACKED["float32"],
            latents=WEIGHT_FORMATS["float32"],
            exceptions={name: packed_format(kind) for name, kind in kinds.items()} | _heads(_INT8 if on_load else None),
            is_copied=names == ["float16"],
            ties_head=False,
        )

    def with_codes(self, config: QuantizationConfig, linears: Iterable[str]) -> "KeptWeights":
        """These, with those of the named linears that GPTQ or AWQ has quantised kept as they are."""
        kept = grouped_format(config)
        assert kept is not None
        if not self.linears.panel > 1:
            size = config.group_size if config.group_size > 0 else _WHOLE_ROW
            kept = WeightFormat(config.name, config.bits, size, 3 if config.has_zeros else 2)
        return replace(
            self,
            exceptions={name: kept for name in linears if config.quantises(name)},
            is_copied=False,
        )

    @classmethod
    def plain(cls, dtype: str, *, on_load: str = "") -> "KeptWeights":
        """On a GPU: floats as torch has them, or what ``on_load`` names in ``ON_LOAD``."""
        fmt = WEIGHT_FORMATS[dtype]
        exact = WEIGHT_FORMATS["float32"]
        linears = ON_LOAD[on_load] if on_load else fmt
        return cls(
            name=linears.name,
            linears=linears,
            table=fmt,
            gates=exact,
            latents=fmt,
            exceptions=_heads(ON_LOAD["int8"] if on_load else None),
            ties_head=not on_load,
        )

    def linear_bytes(self, name: str, rows: int, columns: int) -> int:
        """Bytes of the linear whose weight has this name."""
        return self.exceptions.get(name, self.linears).matrix_bytes(rows, columns)

    def vector_bytes(self, elements: int) -> int:
        """Bytes of a norm or a bias."""
        return elements * _FLOAT32_BYTES
