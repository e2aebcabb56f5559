"""What several caches hold together, out of the events of each."""

from collections import Counter
from collections.abc import Iterable
from itertools import groupby

from ...cluster.ids import BlockHash
from ...kv_store.events import BlocksRemoved, BlocksStored, CacheCleared, KvEvent, SnapshotPart

_Key = tuple[str, BlockHash]
"""Tier and block."""


class EventUnion:
    """A block is stored when a first cache has it, and removed when the last one has not any more.

    Every cache removes children before their parents, and so does the union.
    """

    def __init__(self, num_caches: int) -> None:
        self._held: list[dict[_Key, None]] = [{} for _ in range(num_caches)]
        """By cache, parents before their children."""
        self._holders = Counter[_Key]()

    def merge(self, cache: int, events: Iterable[KvEvent]) -> list[KvEvent]:
        """What the next events of a cache change in the union."""
        merged: list[KvEvent] = []
        for event in events:
            match event:
                case BlocksStored():
                    merged += self._store(cache, event)
                case BlocksRemoved(hashes, tier):
                    merged += self._remove(cache, [(tier, block) for block in hashes])
                case CacheCleared():
                    merged += self._clear(cache)
                case SnapshotPart():  # comes in where snapshots are published, which is after this
                    merged.append(event)
        return merged

    def _store(self, cache: int, event: BlocksStored) -> list[KvEvent]:
        size = len(event.token_ids) // len(event.hashes)
        is_new = [self._take(cache, (event.tier, block)) for block in event.hashes]
        stored: list[KvEvent] = []
        for wanted, indexes in groupby(range(len(is_new)), is_new.__getitem__):
            if wanted:
                run = list(indexes)
                first, end = run[0], run[-1] + 1
                parent = event.hashes[first - 1] if first else event.parent
                tokens = event.token_ids[first * size : end * size]
                stored.append(BlocksStored(parent, event.hashes[first:end], tokens, event.tier))
        return stored

    def _remove(self, cache: int, keys: Iterable[_Key]) -> list[KvEvent]:
        gone = [key for key in keys if self._drop(cache, key)]
        return [
            BlocksRemoved(tuple(block for _, block in run), tier) for tier, run in groupby(gone, lambda key: key[0])
        ]

    def _clear(self, cache: int) -> list[KvEvent]:
        held = list(self._held[cache])
        if any(others for index, others in enumerate(self._held) if index != cache):
            return self._remove(cache, reversed(held))
        self._held[cache].clear()
        self._holders.clear()
        return [CacheCleared()]

    def _take(self, cache: int, key: _Key) -> bool:
        """Whether no cache had it."""
        if key not in self._held[cache]:
            self._held[cache][key] = None
            self._holders[key] += 1
            return self._holders[key] == 1
        return False

    def _drop(self, cache: int, key: _Key) -> bool:
        """Whether no cache has it any more."""
        if key not in self._held[cache]:
            return False
        del self._held[cache][key]
        self._holders[key] -= 1
        if self._holders[key]:
            return False
        del self._holders[key]
        return True
