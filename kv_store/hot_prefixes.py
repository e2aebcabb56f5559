"""The prefixes that save the most work: what a new replica should be warmed with."""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from ..cluster.ids import BlockHash


@dataclass(frozen=True, slots=True)
class HotPrefix:
    """Whole blocks from the start of a namespace on; ``heat`` is prompt tokens saved per second."""

    namespace: BlockHash
    """Of the replica's cache, without a salt."""
    block_size: int
    tokens: bytes
    """As ``hashing.pack_tokens`` makes them."""
    heat: float
    load: float = 0.0
    """Replicas that requests with this prefix keep busy."""
    salt: str = ""
    """The tenant's."""


def merge_hot(told: Iterable[Iterable[HotPrefix]], limit: int) -> list[HotPrefix]:
    """The hottest first, at most ``limit`` of each cache; what several sources tell of one prefix adds up.

    A cache is a namespace with a block size: a model that has much traffic takes no place of another one's.
    """
    merged: dict[tuple[BlockHash, str, int, bytes], HotPrefix] = {}
    for prefixes in told:
        for prefix in prefixes:
            key = (prefix.namespace, prefix.salt, prefix.block_size, prefix.tokens)
            known = merged.get(key)
            merged[key] = prefix if known is None else _sum(known, prefix)
    return list(_first_of_each(sorted(merged.values(), key=lambda prefix: -prefix.heat), limit))


def _first_of_each(prefixes: Iterable[HotPrefix], limit: int) -> Iterator[HotPrefix]:
    seen: Counter[tuple[BlockHash, int]] = Counter()
    for prefix in prefixes:
        cache = prefix.namespace, prefix.block_size
        seen[cache] += 1
        if seen[cache] <= limit:
            yield prefix


def _sum(one: HotPrefix, other: HotPrefix) -> HotPrefix:
    return replace(one, heat=one.heat + other.heat, load=one.load + other.load)
