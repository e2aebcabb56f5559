"""Who of several tenants is next: the one that was served the least for its share.

Deficit round robin with a quantum of one token, its debts kept as counters (virtual token counters: Sheng et al.,
OSDI 2024, arXiv 2401.00588). What is served is charged as it happens, so nobody need know beforehand how long an output
becomes. A tenant that was away gets no credit for that, and keeps what it owes.
"""

from collections.abc import Iterator

_MAX_ABSENT = 64
"""Tenants without requests whose debts are looked through only above this number."""


class FairShares:
    """Tokens served to each tenant, over its share. A tenant on its own is not charged: nobody could tell."""

    def __init__(self) -> None:
        self._requests: dict[str, int] = {}
        self._shares: dict[str, float] = {}
        self._served: dict[str, float] = {}

    def enter(self, tenant: str, share: float) -> None:
        """A request came. The latest ``share`` of a tenant counts; what is not above 0 is 1."""
        count = self._requests.get(tenant, 0)
        if not count and self._requests:
            least = min(self._served.get(other, 0.0) for other in self._requests)
            self._served[tenant] = max(least, self._served.get(tenant, 0.0))
            self._forget(least)
        self._requests[tenant] = count + 1
        self._shares[tenant] = share if share > 0 else 1.0

    def leave(self, tenant: str) -> None:
        """A request that had come is gone. Where nobody is left, nobody owes anything."""
        count = self._requests[tenant] - 1
        if count:
            self._requests[tenant] = count
            return
        del self._requests[tenant], self._shares[tenant]
        if not self._requests:
            self._served.clear()

    def charge(self, tenant: str, tokens: int) -> None:
        """So many tokens were computed for a tenant, whether or not it has requests here now."""
        if len(self._requests) > 1 and tenant in self._requests:
            self._served[tenant] = self._served.get(tenant, 0.0) + tokens / self._shares[tenant]

    def served(self, tenant: str) -> float:
        """Tokens charged, over the share, on a scale that starts where the tenants began to compete."""
        return self._served.get(tenant, 0.0)

    def __iter__(self) -> Iterator[str]:
        """Tenants that have requests here."""
        return iter(self._requests)

    def part_of(self, tenant: str) -> float:
        """What is due to a tenant that has requests here: 0..1."""
        return self.part(tenant, self._shares[tenant])

    def part(self, tenant: str, share: float) -> float:
        """What is due to a tenant of that share among those who have requests here, itself included: 0..1."""
        others = sum(weight for name, weight in self._shares.items() if name != tenant)
        own = share if share > 0 else 1.0
        return own / (own + others)

    def _forget(self, settled: float) -> None:
        """Debts of the absent that would not count any more."""
        if len(self._served) > len(self._requests) + _MAX_ABSENT:
            served, present = self._served, self._requests
            self._served = {name: owed for name, owed in served.items() if name in present or owed > settled}
