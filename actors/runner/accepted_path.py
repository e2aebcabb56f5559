"""Keys and values of accepted nodes of a tree, brought to where the sequence's own stand.

A step stores a tree's nodes one behind the other. Those that stand are a path through it, whose places need not be
neighbours; the places of the others are free again.
"""

from collections.abc import Iterable

import numpy as np
import torch

from ..attention.interface import TreeBackend
from ..attention.kv_memory import KvMemory
from .arrays import Int64s
from .sequences import SequenceState, SequenceTable


def settle(
    accepted: Iterable[tuple[SequenceState, list[int]]], table: SequenceTable, kv: KvMemory, backend: object
) -> None:
    """Of each sequence these nodes stand, in the tree behind its last token. Call it before tokens are appended."""
    moves = [_moves(state, nodes, table, kv.layout.block_size) for state, nodes in accepted if state.draft.parents]
    if not moves:
        return
    sources, destinations = (torch.from_numpy(np.concatenate(ends)) for ends in zip(*moves, strict=True))
    if len(sources):
        assert isinstance(backend, TreeBackend), "only such a backend is given trees"
        device = kv.values[0].device
        backend.move(kv.keys, kv.values, sources.to(device), destinations.to(device))


def _moves(state: SequenceState, nodes: list[int], table: SequenceTable, block_size: int) -> tuple[Int64s, Int64s]:
    """Slots, in all KV groups, of nodes that are not in their places, and of those places."""
    found = np.array(nodes, np.int64)
    places = np.arange(len(found))
    wrong = found != places
    cells = state.num_tokens + np.stack((found[wrong], places[wrong]))
    columns, offsets = np.divmod(cells, block_size)
    slots = [blocks.cells[state.row, columns].astype(np.int64) * block_size + offsets for blocks in table.blocks]
    sources, destinations = np.concatenate(slots, axis=1)
    return sources, destinations
