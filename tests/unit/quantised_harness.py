"""Quantised pages and attention over them as docs/kv_formats.md says, one number at a time."""

from dataclasses import dataclass, field

import numpy as np
import torch

from warmroot.actors.attention.interface import AttentionMetadata
from warmroot.actors.attention.kv_memory import KvMemory
from warmroot.cluster.kv_formats import KV_FORMATS
from warmroot.cluster.kv_layout import KvLayout

F = np.float32


def bfloat_above(x):
    bits = np.array(x, F).view(np.uint32)
    return np.uint32((bits + np.uint32(0xFFFF)) & np.uint32(0xFFFF0000)).view(F)


def quantise_block(keys, bits):
    """[tokens, D] -> what its keys are read as."""
    most = 2**bits - 1
    keys = keys.astype(np.float16).astype(F)
    least, largest = keys.min(0), keys.max(0)
    lowest = least.min()
    minimum = bfloat_above((least.max() - lowest) / F(255))
    base = [lowest + minimum * min(255, np.floor((x - lowest) / minimum)) if minimum else lowest for x in least]
    widths = [(high - low) / F(most) for high, low in zip(largest, base, strict=True)]
    unit = bfloat_above(max(0, *widths) / F(255))
    out = np.zeros_like(keys)
    for d, (low, width) in enumerate(zip(base, widths, strict=True)):
        scale = unit * min(255, max(0, np.ceil(width / unit))) if unit else F(0)
        for t in range(len(keys)):
            code = min(most, max(0, np.rint((keys[t, d] - low) / scale))) if scale else 0
            out[t, d] = low + scale * code
    return out


def quantise_token(values, bits):
    """[D] -> what a token's values are read as."""
    size, parts, most = (len(values), 1, 255) if bits == 8 else (128, 16, 15)
    out = np.zeros_like(values, F)
    for first in range(0, len(values), size):
        group = values[first : first + size].astype(F)
        low, high = min(F(0), group.min()), max(F(0), group.max())
        scale = bfloat_above((high - low) / F(most))
        zero = min(255, np.rint(-low / scale * parts)) / parts if scale else F(0)
        for i, x in enumerate(group):
            code = min(most, max(0, np.rint(x / scale + zero))) if scale else 0
            out[first + i] = scale * (code - zero)
    return out


@dataclass
class Paged:
    """Sequences over quantised pages with shuffled blocks, computed in any steps."""

    backend: object
    format: str
    heads: tuple = (6, 2)
    head_dim: int = 32
    block_size: int = 16
    window: int | None = None
    softcap: float | None = None
    lengths: dict = field(default_factory=dict)
    tables: dict = field(default_factory=dict)
    scale: float = 0.2

    def __post_init__(self):
        self.kv = KvMemory.allocate(
            KvLayout.of((None,), self.block_size), 200, self.heads[1], self.head_dim, KV_FORMATS[self.format],
            torch.device("cpu"), self.backend,
        )  # fmt: skip
        self.free = (1 + torch.randperm(199, generator=torch.Generator().manual_seed(5))).tolist()

    def step(self, chunks):
        """{sequence: (q, k, v) [T, heads, D]} -> {sequence: output}."""
        size, slots = self.block_size, []
        for index, (_, k, _) in chunks.items():
            start = self.lengths.get(index, 0)
            table = self.tables.setdefault(index, [])
            while len(table) * size < start + len(k):
                table.append(self.free.pop())
            slots += [table[p // size] * size + p % size for p in range(start, start + len(k))]
            self.lengths[index] = start + len(k)
        width = max(len(self.tables[i]) for i in chunks)
        counts = [len(chunk[0]) for chunk in chunks.values()]
        metadata = AttentionMetadata(
            torch.tensor([0, *counts]).cumsum(0).int(),
            torch.tensor([self.lengths[i] for i in chunks], dtype=torch.int32),
            torch.tensor([self.tables[i] + [0] * (width - len(self.tables[i])) for i in chunks], dtype=torch.int32),
            torch.tensor(slots),
            max(counts),
            max(self.lengths[i] for i in chunks),
        )
        q, k, v = (torch.cat(parts) for parts in zip(*chunks.values(), strict=True))
        self.kv.prepare((metadata,))
        self.backend.append(k, v, self.kv.keys[0], self.kv.values[0], metadata.slot_mapping)
        out = self.backend.forward(
            q, self.kv.keys[0], self.kv.values[0], metadata, scale=self.scale, window=self.window, softcap=self.softcap
        )
        return dict(zip(chunks, out.split(counts), strict=True))

    def pages(self, index):
        """The bytes of a sequence's whole blocks."""
        whole = self.tables[index][: self.lengths[index] // self.block_size]
        return self.kv.keys[0].pages[whole], self.kv.values[0][whole]

    def read_back(self, index):
        """Keys and values [T, K, D] of a sequence as its pages have them."""
        codec = self.kv.keys[0].codec
        table, length = self.tables[index], self.lengths[index]
        keys = codec.decode_keys(self.kv.keys[0].pages[table]).permute(0, 3, 1, 2).flatten(0, 1)
        values = codec.decode_values(self.kv.values[0][table]).transpose(1, 2).flatten(0, 1)
        return keys[:length], values[:length]

    def in_own_block(self, k):
        """What a query reads keys of its own block as."""
        return k.half().float()

    def naive(self, index, q, k):
        """A sequence's outputs [T, heads, D] from its first token on, over what its pages have now."""
        group, rows = self.heads[0] // self.heads[1], []
        keys, values = self.read_back(index)
        for p in range(len(q)):
            own = p // self.block_size * self.block_size
            first = 0 if self.window is None else max(0, p - self.window + 1)
            for head in range(self.heads[0]):
                kv_head = head // group
                seen = torch.cat((keys[:own, kv_head], self.in_own_block(k[own : p + 1, kv_head])))[first:]
                scores = seen @ q[p, head] * self.scale
                if self.softcap is not None:
                    scores = self.softcap * torch.tanh(scores / self.softcap)
                rows.append(torch.softmax(scores, 0) @ values[first : p + 1, kv_head])
        return torch.stack(rows).view(q.shape)


def tokens(length, heads, head_dim, seed=0):
    """(q, k, v) with channels of different means and widths, as keys have."""
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(length, heads[0], head_dim, generator=generator)
    k, v = torch.randn(2, length, heads[1], head_dim, generator=generator)
    spread = torch.linspace(-2, 2, head_dim)
    return q, k * (1 + spread.abs()) + 3 * spread, v
