"""One decoder over KV memory of different formats, by hand: what is stored, how fast it is read, what it costs."""

import time
from collections.abc import Sequence
from typing import NamedTuple

import torch

from ...actors.attention.interface import AttentionMetadata
from ...actors.attention.kv_memory import KvMemory, KvType
from ...actors.models.decoder import Decoder
from ...actors.runner.memory import page_bytes
from ...cluster.kv_layout import KvLayout

_CHUNK = 512


class Sequences:
    """``count`` sequences of one length in KV memory of their own. Models with windows keep all of their blocks."""

    def __init__(self, decoder: Decoder, kv_type: KvType, count: int, max_tokens: int, block_size: int) -> None:
        self._decoder = decoder
        self.count = count
        self._layout = layout = KvLayout.of(decoder.spec.layer_windows, block_size)
        self._width = -(-max_tokens // block_size)
        num_blocks = 1 + count * self._width * len(layout.groups)
        spec = decoder.spec
        self.page_bytes = page_bytes(spec, layout, kv_type)
        """Of one block, in all layers of a group."""
        self._kv = KvMemory.allocate(
            layout, num_blocks, spec.cache_heads, spec.cache_dim, kv_type, decoder.device, decoder.backend
        )
        blocks = torch.arange(1, num_blocks, dtype=torch.int32)
        self._tables = blocks.view(len(layout.groups), count, self._width)
        self.length = 0

    def append(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Token ids [count, T] -> hidden states [count, T, hidden]."""
        count, num_tokens = token_ids.shape
        positions = torch.arange(self.length, self.length + num_tokens)
        self.length += num_tokens
        size = self._layout.block_size
        starts = torch.arange(0, count * num_tokens + 1, num_tokens, dtype=torch.int32)
        lengths = torch.full((count,), self.length, dtype=torch.int32)
        metadata = tuple(
            AttentionMetadata(
                starts,
                lengths,
                table,
                (table.long()[:, positions // size] * size + positions % size).flatten(),
                num_tokens,
                self.length,
            )
            for table in self._tables
        )
        hidden = self._decoder.forward(token_ids.flatten(), positions.repeat(count), self._kv, metadata)
        return hidden.unflatten(0, (count, num_tokens))

    def fill(self, token_ids: torch.Tensor) -> torch.Tensor:
        """As ``append``, of one sequence, in chunks."""
        return torch.cat([self.append(chunk) for chunk in token_ids.split(_CHUNK, 1)], 1)

    def rewind(self) -> None:
        """Begin anew."""
        self.length = 0


class Quality(NamedTuple):
    """Sums over the tokens of a text."""

    nll: float
    """Negative log-likelihood."""
    kl: float
    """Kullback-Leibler divergence of the next token's distribution from the reference's."""
    agreed: int
    """How often both have the same likeliest token."""
    tokens: int

    def plus(self, other: "Quality") -> "Quality":
        """Of both texts together."""
        return Quality(self.nll + other.nll, self.kl + other.kl, self.agreed + other.agreed, self.tokens + other.tokens)


def log_probs(decoder: Decoder, sequence: Sequences, window: Sequence[int]) -> torch.Tensor:
    """[T - 1, vocab] of the tokens that follow each of the window's."""
    sequence.rewind()
    logits = decoder.logits(sequence.fill(torch.tensor([window[:-1]]))[0])
    assert logits is not None
    return torch.log_softmax(logits, -1)


def compare(ours: torch.Tensor, reference: torch.Tensor, window: Sequence[int]) -> Quality:
    """Of one window's log-probabilities against those of the reference."""
    nll = -ours.gather(1, torch.tensor(window[1:])[:, None]).double().sum()
    kl = (reference.exp() * (reference - ours)).double().sum()
    agreed = (ours.argmax(-1) == reference.argmax(-1)).sum()
    return Quality(float(nll), float(kl), int(agreed), len(ours))


def decode_seconds(sequences: Sequence[Sequences], steps: int) -> list[list[float]]:
    """Of each contender, seconds of ``steps`` steps of one token; they take turns step by step."""
    seconds: list[list[float]] = [[] for _ in sequences]
    for step in range(steps):
        for index in range(len(sequences)):
            which = (index + step) % len(sequences)  # nobody always follows the same one
            token_ids = torch.full((sequences[which].count, 1), 7 + step)
            start = time.perf_counter()
            sequences[which].append(token_ids)
            seconds[which].append(time.perf_counter() - start)
    return seconds
