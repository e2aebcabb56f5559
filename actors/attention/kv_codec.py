"""Quantised pages in plain torch: the reference of ``kernels/native/kv_quantised.h``, and what GPUs use.

``docs/kv_formats.md`` has the layouts. Pages are bytes, [..., page bytes] of one KV head, scales and all.
"""

from dataclasses import dataclass

import torch

from ...cluster.kv_formats import GROUP_SIZE, KvFormat

_ZERO_PARTS = 16
"""Parts of a four-bit code that a zero point counts; of an eight-bit one it counts whole codes."""


@dataclass(frozen=True, slots=True)
class PageCodec:
    """Pages of one head: D = ``head_dim``, S = ``block_size``."""

    format: KvFormat
    head_dim: int
    block_size: int

    @property
    def key_bytes(self) -> int:
        """Bytes of a page of keys."""
        return self.format.key.page_bytes(self.head_dim, self.block_size)

    @property
    def value_bytes(self) -> int:
        """Bytes of a page of values."""
        return self.format.value.page_bytes(self.head_dim, self.block_size)

    def encode_keys(self, k_PKDS: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """Keys [P, K, D, S] float32, of which the first ``counts`` [P] tokens of each page are there -> its bytes."""
        most = 2**self.format.key.bits - 1
        here = (torch.arange(self.block_size, device=counts.device) < counts[:, None])[:, None, None]
        least = k_PKDS.masked_fill(~here, torch.inf).amin(-1)  # [P, K, D]
        largest = k_PKDS.masked_fill(~here, -torch.inf).amax(-1)
        lowest = least.amin(-1, keepdim=True)
        minimum_unit = bfloat_above((least.amax(-1, keepdim=True) - lowest) / 255)
        minima = ((least - lowest) / minimum_unit).nan_to_num(0.0).floor().clamp(0, 255)
        base = lowest + minimum_unit * minima
        scale = (largest - base) / most
        scale_unit = bfloat_above(scale.amax(-1, keepdim=True).clamp(min=0) / 255)
        scales = (scale / scale_unit).nan_to_num(0.0).ceil().clamp(0, 255)
        inverse = (1 / (scale_unit * scales)).masked_fill(scales == 0, 0.0)
        codes = ((k_PKDS - base[..., None]) * inverse[..., None]).round().clamp(0, most) * here
        parts = (
            _pack(codes.byte(), self.format.key.bits, -2).flatten(-2),
            scales.byte(),
            minima.byte(),
            lowest.contiguous().view(torch.uint8),
            bfloat_bytes(scale_unit),
            bfloat_bytes(minimum_unit),
        )
        return torch.cat(parts, -1)

    def decode_keys(self, pages: torch.Tensor) -> torch.Tensor:
        """[..., page bytes] -> [..., D, S] float32."""
        size = self.head_dim
        codes, scales, minima, lowest, units = pages.split((pages.shape[-1] - 2 * size - 8, size, size, 4, 4), -1)
        scale_unit, minimum_unit = copied(units).view(torch.bfloat16).float().split(1, -1)
        base = copied(lowest).view(torch.float32) + minimum_unit * minima
        values = _unpack(codes.unflatten(-1, (-1, self.block_size)), self.format.key.bits, -2, size)
        return values * (scale_unit * scales)[..., None] + base[..., None]

    def store_values(
        self, pages: torch.Tensor, blocks: torch.Tensor, offsets: torch.Tensor, v_TKD: torch.Tensor
    ) -> None:
        """Write T tokens' values [T, K, D] float32 at ``offsets`` [T] of pages [num_blocks, K, page bytes]."""
        bits = self.format.value.bits
        most, zero_parts = 2**bits - 1, _ZERO_PARTS if bits == 4 else 1
        groups = v_TKD.split(self._group_size, -1)
        least = torch.stack([group.amin(-1) for group in groups], -1).clamp(max=0)  # [T, K, groups]
        largest = torch.stack([group.amax(-1) for group in groups], -1).clamp(min=0)
        scales = bfloat_above((largest - least) / most)
        inverse = (1 / scales).masked_fill(scales == 0, 0.0)
        zeros = (-least * inverse * zero_parts).round().clamp(0, 255)
        codes = (v_TKD - self._spread(-scales * (zeros / zero_parts))) * self._spread(inverse)
        code_pages, scale_pages, zero_pages = self._value_parts(pages)
        code_pages[blocks, :, offsets] = _pack(codes.round().clamp(0, most).byte(), bits, -1)
        scale_pages[blocks, :, offsets] = bfloat_bytes(scales)
        zero_pages[blocks, :, offsets] = zeros.byte()

    def decode_values(self, pages: torch.Tensor) -> torch.Tensor:
        """[..., page bytes] -> [..., S, D] float32."""
        bits = self.format.value.bits
        codes, scale_bytes, zeros = self._value_parts(pages)
        scales = copied(scale_bytes).view(torch.bfloat16).float()
        base = -scales * (zeros / (_ZERO_PARTS if bits == 4 else 1))
        return _unpack(codes, bits, -1, self.head_dim) * self._spread(scales) + self._spread(base)

    @property
    def _group_size(self) -> int:
        return self.head_dim if self.format.value.scaled_per == "token" else GROUP_SIZE

    def _spread(self, x: torch.Tensor) -> torch.Tensor:
        """[..., groups] -> [..., D]."""
        return x.repeat_interleave(self._group_size, -1)[..., : self.head_dim]

    def _value_parts(self, pages: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Views [..., S, n] of a page's codes, scales and zero points."""
        code_bytes = -(-self.head_dim * self.format.value.bits // 8)
        groups = -(-self.head_dim // self._group_size)
        parts = pages.split([self.block_size * size for size in (code_bytes, 2 * groups, groups)], -1)
        codes, scales, zeros = (part.unflatten(-1, (self.block_size, -1)) for part in parts)
        return codes, scales, zeros


def _pack(codes: torch.Tensor, bits: int, dim: int) -> torch.Tensor:
    """Four-bit codes two a byte: the dimension's first half in the low bits, its second in the high ones."""
    if bits == 8:
        return codes
    size = codes.shape[dim]
    low, high = codes.split((size - size // 2, size // 2), dim)
    packed = low.clone()
    packed.narrow(dim, 0, size // 2).bitwise_or_(high << 4)
    return packed


def _unpack(packed: torch.Tensor, bits: int, dim: int, size: int) -> torch.Tensor:
    codes = packed if bits == 8 else torch.cat((packed & 15, (packed >> 4).narrow(dim, 0, size // 2)), dim)
    return codes.float()


def bfloat_above(x: torch.Tensor) -> torch.Tensor:
    """The smallest bfloat16 that is not below ``x`` >= 0, as float32."""
    return ((x.contiguous().view(torch.int32) + 0xFFFF) >> 16 << 16).view(torch.float32)


def bfloat_bytes(x: torch.Tensor) -> torch.Tensor:
    """[..., n] that are bfloat16 already -> [..., 2 * n]."""
    return x.bfloat16().contiguous().view(torch.uint8)


def copied(pages: torch.Tensor) -> torch.Tensor:
    """Aligned, so that bytes can be viewed as something else."""
    return pages.clone(memory_format=torch.contiguous_format)
