"""Embeddings: one vector of a whole prompt, from the hidden states behind the final norm."""

from collections.abc import Iterator

import torch

from .batch import Batch
from .sequences import SequenceState


def pooled(batch: Batch, hidden: torch.Tensor) -> dict[str, bytes]:
    """By request id, float32 [hidden] of the sequences that ask for one and whose prompt ends in this step.

    ``hidden`` is [T, hidden]. What chunks before the last one have to say is kept with the sequence.
    """
    return {state.request_id: vector for state, vector in _vectors(batch, hidden) if vector is not None}


def _vectors(batch: Batch, hidden: torch.Tensor) -> Iterator[tuple[SequenceState, bytes | None]]:
    for index, state in enumerate(batch.states):
        pooling = state.params.pooling
        if pooling is None:
            continue
        start, end = batch.cu_seqlens_q[index : index + 2].tolist()
        ends = int(batch.positions[end - 1]) + 1 == state.num_prompt
        if pooling == "last":
            yield state, _bytes(hidden[end - 1]) if ends else None
            continue
        total = hidden[start:end].sum(0, dtype=torch.float32)
        state.pooled = total if state.pooled is None else state.pooled.add_(total)
        yield state, _bytes(state.pooled / state.num_prompt) if ends else None


def _bytes(vector: torch.Tensor) -> bytes:
    return vector.float().cpu().numpy().astype("<f4").tobytes()
