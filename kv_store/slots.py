"""Sets of replicas as integers: each replica has a bit for as long as something is known of it."""

from ..cluster.ids import ReplicaId

Held = list[tuple[int, int]]
"""(mask, tokens): these replicas hold that many leading tokens of a prompt. A later pair overrules an earlier one."""


class ReplicaSlots:
    """Which bit is whose. Free ones are used again, so masks stay as narrow as the cluster is large."""

    __slots__ = ("names", "version")

    def __init__(self) -> None:
        self.names: list[ReplicaId | None] = []
        """By slot; None: free."""
        self.version = 0
        """Rises with every change."""

    def take(self, name: ReplicaId) -> int:
        """A slot for a replica that has none."""
        slot = self.names.index(None) if None in self.names else len(self.names)
        self.names[slot : slot + 1] = [name]
        self.version += 1
        return slot

    def free(self, slot: int) -> None:
        """Nothing is known of its replica any more."""
        self.names[slot] = None
        self.version += 1

    def named(self, mask: int) -> tuple[ReplicaId, ...]:
        """The replicas of a set."""
        return tuple(name for slot in slots_of(mask) if (name := self.names[slot]) is not None)

    def by_name(self, held: Held) -> dict[ReplicaId, int]:
        """Tokens of each replica."""
        found: dict[ReplicaId, int] = {}
        for mask, tokens in held:
            found.update(dict.fromkeys(self.named(mask), tokens))
        return found


def slots_of(mask: int) -> list[int]:
    """The bits that are set, lowest first."""
    slots: list[int] = []
    while mask:
        lowest = mask & -mask
        slots.append(lowest.bit_length() - 1)
        mask ^= lowest
    return slots
