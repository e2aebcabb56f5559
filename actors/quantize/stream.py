"""Calibration texts on their way through a decoder, one layer at a time."""

from collections.abc import Sequence

import torch

from ...cluster.kv_layout import KvLayout
from ..attention.interface import AttentionMetadata
from ..attention.kv_memory import KvMemory
from ..models.decoder import Decoder

_BLOCK_SIZE = 16


class CalibrationStream:
    """Hidden states of all texts before some layer. ``samples`` are token ids of one length."""

    def __init__(self, decoder: Decoder, samples: Sequence[Sequence[int]]) -> None:
        self._decoder = decoder
        self._hidden = [decoder.embedding(torch.tensor(sample)) for sample in samples]
        length = len(samples[0])
        num_blocks = -(-length // _BLOCK_SIZE)
        layout = KvLayout.of(decoder.spec.layer_windows, _BLOCK_SIZE)
        self._kv = KvMemory.allocate(
            layout,
            1 + num_blocks,
            decoder.spec.cache_heads,
            decoder.spec.cache_dim,
            decoder.dtype,
            decoder.device,
            decoder.backend,
        )
        # A text's keys are read while its layer computes, and never again: one table serves all texts and groups.
        self._metadata = AttentionMetadata(
            cu_seqlens_q=torch.tensor([0, length], dtype=torch.int32),
            seqused_k=torch.tensor([length], dtype=torch.int32),
            block_table=torch.arange(1, 1 + num_blocks, dtype=torch.int32)[None],
            slot_mapping=torch.arange(_BLOCK_SIZE, _BLOCK_SIZE + length),
            max_seqlen_q=length,
            max_seqlen_k=length,
        )
        self._positions = torch.arange(length)

    def look(self, index: int) -> None:
        """Run a layer for those who watch."""
        for hidden in self._hidden:
            self._layer(index, hidden.clone())

    def advance(self, index: int) -> None:
        """Run a layer: its outputs are what the next one is given."""
        self._hidden = [self._layer(index, hidden) for hidden in self._hidden]

    def _layer(self, index: int, hidden: torch.Tensor) -> torch.Tensor:
        layer = self._decoder.layers[index]
        _, slot = self._kv.layout.place(index)
        angles = self._decoder.rotary[layer.rope].angles(self._positions, self._decoder.dtype)
        return layer(hidden, angles, self._kv.keys[slot], self._kv.values[slot], self._metadata)
