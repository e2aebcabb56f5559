"""Keeps requests apart that may be what ends replicas, so that the next loss tells which of them is.

All that runs on a replica shares its end. Whoever was there once too often would be given up with the one that did it;
so whoever has only one loss left gets a replica on which no other such request runs.
"""

from collections.abc import Iterable

from ..cluster.ids import ReplicaId
from .ticket import Ticket


class Quarantine:
    """The suspects of one router. Those of others it does not know: replicas refuse a second one."""

    def __init__(self) -> None:
        self._tickets: set[Ticket] = set()

    @property
    def replicas(self) -> frozenset[ReplicaId]:
        """Where suspects run."""
        self._tickets = {ticket for ticket in self._tickets if ticket.replica is not None}
        return frozenset(ticket.replica for ticket in self._tickets if ticket.replica is not None)

    def fills(self, replicas: Iterable[ReplicaId]) -> bool:
        """Whether there is a suspect on each of them already. Without any of them there is room for one that comes."""
        names = set(replicas)
        return bool(names) and self.replicas >= names

    def enter(self, ticket: Ticket) -> bool:
        """Take a suspect in until its ticket ends. False: there is another one where it is bound to now."""
        self._tickets.discard(ticket)
        if ticket.replica in self.replicas:
            return False
        self._tickets.add(ticket)
        return True
