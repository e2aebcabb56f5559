"""What a cached token costs in each KV format, scales and all. ``docs/kv_formats.md`` has the layouts."""

from dataclasses import dataclass
from typing import Literal

from .errors import ConfigError

GROUP_SIZE = 128
"""Most elements that share one scale in ``group`` scaling."""
CHANNEL_BYTES = 2
"""A scale and a minimum, in units that a page has once."""
UNITS_BYTES = 8
"""The lowest minimum, and the units of scales and minima."""
SCALE_BYTES = 3
"""A scale of two bytes and a zero point of one."""
FLOAT_SCALE_BYTES = 2
"""A scale without a zero point."""


@dataclass(frozen=True, slots=True)
class Storage:
    """How the keys, or the values, of one head are kept.

    ``scaled_per``: None (plain floats), a ``channel`` of a block, a ``token``, or a ``group`` of a token's elements.
    """

    bits: int
    scaled_per: Literal["channel", "token", "group"] | None = None
    is_float: bool = False
    """Scaled codes are floats (e4m3), which need no zero point."""

    def page_bytes(self, head_dim: int, block_size: int) -> int:
        """Bytes of ``block_size`` tokens of one head."""
        codes = block_size * -(-head_dim * self.bits // 8)
        if self.scaled_per is None:
            return codes
        if self.scaled_per == "channel":
            return codes + head_dim * CHANNEL_BYTES + UNITS_BYTES
        groups = 1 if self.scaled_per == "token" else -(-head_dim // GROUP_SIZE)
        return codes + block_size * groups * (FLOAT_SCALE_BYTES if self.is_float else SCALE_BYTES)


@dataclass(frozen=True, slots=True)
class KvFormat:
    """A KV format."""

    name: str
    key: Storage
    value: Storage

    def __str__(self) -> str:
        return self.name

    @property
    def is_quantised(self) -> bool:
        """Whether pages hold codes and scales instead of floats."""
        return self.key.scaled_per is not None

    @property
    def quantises_blocks(self) -> bool:
        """Whether scales depend on all of a block's tokens, so that it is quantised anew until it is full."""
        return self.key.scaled_per == "channel"

    def page_bytes(self, head_dim: int, block_size: int) -> int:
        """Keys and values of ``block_size`` tokens of one KV head."""
        return self.key.page_bytes(head_dim, block_size) + self.value.page_bytes(head_dim, block_size)

    def open_page_bytes(self, head_dim: int, block_size: int) -> int:
        """Keys of ``block_size`` tokens of one KV head in 16 bits, beside a quantised page that tokens still join."""
        return 2 * head_dim * block_size if self.quantises_blocks else 0

    def token_bytes(self, head_dim: int, block_size: int) -> float:
        """Keys and values of one token of one KV head; scales per block are spread over its tokens."""
        return self.page_bytes(head_dim, block_size) / block_size


KV_FORMATS: dict[str, KvFormat] = {
    fmt.name: fmt
    for fmt in (
        KvFormat("fp32", Storage(32), Storage(32)),
        KvFormat("fp16", Storage(16), Storage(16)),
        KvFormat("bf16", Storage(16), Storage(16)),
        KvFormat("fp8", Storage(8, "token", is_float=True), Storage(8, "token", is_float=True)),
        KvFormat("int8", Storage(8, "channel"), Storage(8, "token")),
        KvFormat("int4", Storage(4, "channel"), Storage(4, "group")),
        KvFormat("k8v4", Storage(8, "channel"), Storage(4, "group")),
    )
}

_BY_DTYPE = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}


def kv_format(name: str, dtype: str) -> KvFormat:
    """The format called ``name``; ``auto`` is the one of the weights' ``dtype``. Raises ConfigError."""
    resolved = _BY_DTYPE.get(dtype, dtype) if name == "auto" else name
    if resolved not in KV_FORMATS:
        raise ConfigError(
            f"kv_cache_dtype: {name!r} is not one of auto, {', '.join(KV_FORMATS)}", param="kv_cache_dtype"
        )
    return KV_FORMATS[resolved]
