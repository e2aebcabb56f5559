"""What the router asks of an index of prefixes."""

from typing import Protocol

from ..cluster.ids import BlockHash
from ..kv_store.slots import Held, ReplicaSlots


class MatchingIndex(Protocol):
    """Tells who holds a prompt's prefix, as ``PrefixIndex`` does."""

    @property
    def slots(self) -> ReplicaSlots:
        """Whose the bits of masks are."""
        ...

    def held(self, namespace: BlockHash, tokens: bytes, block_size: int) -> Held:
        """Leading tokens that sets of replicas hold."""
        ...
