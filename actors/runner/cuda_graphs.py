"""Decode steps recorded once per batch size: one launch instead of hundreds. Not run on a GPU yet.

A recording reads its inputs from the same tensors every time, so a step fills those of the next larger size; the rows
left over are padding (see ``DecodeBatch``), whose keys and values go to the null page, where nobody looks.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence

import torch

from .decode import DecodeBatch, EagerDecodes
from .sequences import SequenceState, SequenceTable

Compute = Callable[[], torch.Tensor | None]
Record = Callable[[Compute], Compute]
"""Gives a function that computes the same again, into the same tensor."""

_WARM_UPS = 2
"""Runs before a recording: libraries choose kernels and take workspaces, which must not be recorded."""


def graph_sizes(max_num_seqs: int) -> tuple[int, ...]:
    """1, 2, 4, 8, then every multiple of 8 to 64, of 32 beyond, and ``max_num_seqs`` itself."""
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, max_num_seqs, 32)]
    return (*(size for size in sizes if size < max_num_seqs), max_num_seqs)


class DecodeGraphs:
    """Steps of decodes from recordings. Each is made when a batch of its size first comes."""

    def __init__(
        self,
        compute: Callable[[DecodeBatch, int], torch.Tensor | None],
        make_batch: Callable[[int], DecodeBatch],
        sizes: tuple[int, ...],
        record: Record,
        eager: EagerDecodes,
    ) -> None:
        """``compute`` is that of ``eager``, which takes batches beyond the largest of the ascending ``sizes``."""
        self._compute = compute
        self._make_batch = make_batch
        self._sizes = sizes
        self._record = record
        self._eager = eager
        self._recorded: dict[int, tuple[DecodeBatch, Compute]] = {}

    def logits(self, table: SequenceTable, states: list[SequenceState], computed: Sequence[int]) -> torch.Tensor | None:
        """[B, vocab] of the tokens after the ``computed`` ones, valid until the next call.

        None where another rank samples.
        """
        if len(states) > self._sizes[-1]:
            return self._eager.logits(table, states, computed)
        size = self._sizes[bisect_left(self._sizes, len(states))]
        if size not in self._recorded:
            self._recorded[size] = self._make(size)
        batch, replay = self._recorded[size]
        batch.fill(table, states, computed)
        logits = replay()
        return None if logits is None else logits[: len(states)]

    def _make(self, size: int) -> tuple[DecodeBatch, Compute]:
        """Recorded on padding alone, with room for the longest sequence."""
        batch = self._make_batch(size)
        return batch, self._record(lambda: self._compute(batch, batch.key_limit))


class CudaRecorder:
    """Records CUDA graphs that share their memory: they never run at the same time."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, compute: Compute) -> Compute:
        """See ``Record``."""
        here, aside = torch.cuda.current_stream(), torch.cuda.Stream()
        aside.wait_stream(here)
        with torch.cuda.stream(aside):
            for _ in range(_WARM_UPS):
                compute()
        here.wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            result = compute()

        def replay() -> torch.Tensor | None:
            graph.replay()
            return result

        return replay
