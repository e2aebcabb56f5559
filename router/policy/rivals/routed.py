"""What rivals remember of the prompts they routed: which replica got which blocks, and how lately."""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ....cluster.ids import ReplicaId, RequestId
from ....kv_store.hashing import TOKEN_BYTES
from ..base import Binding, Candidates, Numbers, RoutingRequest


@dataclass(frozen=True, slots=True)
class Scale:
    """Blocks as rivals see them: packed ids in one, and prompt tokens that an id stands for (see ``RoutingCore``)."""

    block_ids: int = 16
    tokens_per_id: int = 1

    @property
    def block_tokens(self) -> int:
        """Prompt tokens of a block."""
        return self.block_ids * self.tokens_per_id

    def keys(self, request: RoutingRequest) -> list[int]:
        """A key for each whole block that also stands for all before it."""
        step, tokens, key = self.block_ids * TOKEN_BYTES, request.tokens, hash(request.salt)
        keys: list[int] = []
        for start in range(0, len(tokens) - step + 1, step):
            key = hash((key, tokens[start : start + step]))
            keys.append(key)
        return keys


class RoutedPrefixes:
    """Owners of blocks. ``most_blocks`` limits what is remembered of each replica, least recently routed first."""

    def __init__(self, most_blocks: int | None = None) -> None:
        self._most_blocks = most_blocks
        self._owners: dict[int, dict[ReplicaId, None]] = {}
        self._blocks: dict[ReplicaId, OrderedDict[int, None]] = {}

    def add(self, keys: Sequence[int], replica: ReplicaId) -> None:
        """A prompt went there."""
        blocks = self._blocks.setdefault(replica, OrderedDict())
        # The tail is forgotten before the head.
        for key in reversed(keys):
            owners = self._owners.setdefault(key, {})
            owners.pop(replica, None)
            owners[replica] = None
            blocks[key] = None
            blocks.move_to_end(key)
        while self._most_blocks is not None and len(blocks) > self._most_blocks:
            self._disown(blocks.popitem(last=False)[0], replica)

    def drop(self, replica: ReplicaId) -> None:
        """Forget a replica."""
        for key in self._blocks.pop(replica, ()):
            self._disown(key, replica)

    def longest(self, keys: Sequence[int]) -> tuple[int, list[ReplicaId]]:
        """Blocks of the longest known prefix, and who got it, the latest last."""
        depth, owners = 0, dict[ReplicaId, None]()
        for key in keys:
            found = self._owners.get(key)
            if not found:
                break
            depth, owners = depth + 1, found
        return depth, list(owners)

    def matched(self, keys: Sequence[int], names: Sequence[ReplicaId]) -> Numbers:
        """Leading blocks that each of ``names`` got."""
        depths = dict[ReplicaId, int]()
        for depth, key in enumerate(keys, 1):
            found = self._owners.get(key)
            if not found:
                break
            depths.update(dict.fromkeys(found, depth))
        return np.array([depths.get(name, 0) for name in names], dtype=np.float64)

    def sizes(self, names: Sequence[ReplicaId]) -> Numbers:
        """Blocks remembered of each."""
        return np.array([len(self._blocks.get(name, ())) for name in names], dtype=np.float64)

    def _disown(self, key: int, replica: ReplicaId) -> None:
        owners = self._owners[key]
        owners.pop(replica, None)
        if not owners:
            del self._owners[key]


class Remembering:
    """A policy that keeps ``RoutedPrefixes``."""

    binds_late = False

    def __init__(self, scale: Scale, most_blocks: int | None = None) -> None:
        self.scale = scale
        self.routed_prefixes = RoutedPrefixes(most_blocks)

    def binding(self, late: Binding | None) -> Binding | None:
        """See ``Policy``."""

    def routed(self, request: RoutingRequest, replica: ReplicaId) -> None:
        """See ``Policy``."""
        self.routed_prefixes.add(self.scale.keys(request), replica)

    def first_token(self, request: RoutingRequest, replica: ReplicaId) -> None:
        """See ``Policy``."""

    def finished(self, request: RoutingRequest, replica: ReplicaId) -> None:
        """See ``Policy``."""

    def left(self, replica: ReplicaId) -> None:
        """See ``Policy``."""
        self.routed_prefixes.drop(replica)


class ActiveBlocks:
    """Distinct blocks of the prompts that each replica works on, as Dynamo's router counts them."""

    def __init__(self) -> None:
        self._holders: dict[ReplicaId, dict[int, int]] = {}
        self._requests: dict[tuple[RequestId, ReplicaId], list[int]] = {}

    def add(self, request_id: RequestId, keys: list[int], replica: ReplicaId) -> None:
        """A request went there."""
        held = self._holders.setdefault(replica, {})
        self._requests[request_id, replica] = keys
        for key in keys:
            held[key] = held.get(key, 0) + 1

    def remove(self, request_id: RequestId, replica: ReplicaId) -> None:
        """It ended."""
        held = self._holders.get(replica, {})
        for key in self._requests.pop((request_id, replica), ()):
            if key in held:
                held[key] -= 1
                if not held[key]:
                    del held[key]

    def drop(self, replica: ReplicaId) -> None:
        """Forget a replica."""
        self._holders.pop(replica, None)

    def with_request(self, keys: Sequence[int], names: Sequence[ReplicaId]) -> Numbers:
        """Blocks of each if the request went there too."""
        counts: list[int] = []
        for name in names:
            held = self._holders.get(name, {})
            counts.append(len(held) + sum(key not in held for key in keys))
        return np.array(counts, dtype=np.float64)


def prefer(places: Numbers, candidates: Candidates) -> Numbers:
    """Costs that put ``places`` (a mask) first and the others after them, each by their requests."""
    load = candidates.occupancy
    return np.where(places, 0.0, 1.0 + load)
