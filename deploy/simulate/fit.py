"""Step costs from measurements: least squares on relative errors, without negative terms."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from .costs import ReplicaCosts


def fit_costs(
    prefills: Sequence[tuple[int, float]],
    decodes: Sequence[tuple[int, int, float]],
    *,
    kv_tokens: int,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    max_prefill_chunk: int | None = None,
) -> ReplicaCosts:
    """``prefills``: (tokens, seconds) of steps that compute one prompt; ``decodes``: (sequences, context of each,
    seconds).
    """
    prefill = _fit([(1.0, tokens, tokens**2) for tokens, _ in prefills], [seconds for _, seconds in prefills])
    features = [(1.0, batch, batch * context / kv_tokens) for batch, context, _ in decodes]
    decode = _fit(features, [seconds for *_, seconds in decodes])
    return ReplicaCosts(
        prefill_fixed_s=prefill[0],
        prefill_token_s=prefill[1],
        prefill_square_s=prefill[2],
        # A prompt of n tokens is n² / 2 pairs; behind a cached prefix each new token has all of it before it.
        prefill_context_s=2 * prefill[2],
        decode_fixed_s=decode[0],
        decode_sequence_s=decode[1],
        decode_usage_s=decode[2],
        decode_usage_square_s=0.0,
        kv_tokens=kv_tokens,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_prefill_chunk=max_prefill_chunk,
    )


def _fit(features: Sequence[tuple[float, ...]], seconds: Sequence[float]) -> list[float]:
    """Coefficients; a term that would be negative is left out."""
    matrix: NDArray[np.float64] = np.array(features, dtype=np.float64) / np.array(seconds)[:, None]
    used, found = list(range(matrix.shape[1])), np.zeros(matrix.shape[1])
    while used:
        solution = np.linalg.lstsq(matrix[:, used], np.ones(len(seconds)), rcond=None)[0]
        if solution.min() >= 0:
            found[used] = solution
            break
        used.pop(int(solution.argmin()))
    return found.tolist()
