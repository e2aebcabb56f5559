"""Whose the namespaces of cached blocks are, as far as a router has seen requests for them."""

from collections import OrderedDict
from collections.abc import Iterable

from ..cluster.ids import BlockHash
from ..kv_store.hashing import salted

MOST_SALTS = 256
_MOST_NAMES = 4


class SaltOwners:
    """Remembers the tenants of the salts that were used last: a hash does not tell what went into it."""

    def __init__(self, most: int = MOST_SALTS) -> None:
        self._tenants: OrderedDict[str, dict[str, None]] = OrderedDict()
        self._most = most

    def note(self, salt: str, tenant: str) -> None:
        """A request of ``tenant`` came with ``salt``."""
        names = self._tenants.setdefault(salt, {})
        self._tenants.move_to_end(salt)
        if tenant and len(names) < _MOST_NAMES:
            names[tenant] = None
        if len(self._tenants) > self._most:
            self._tenants.popitem(last=False)

    def of(self, namespaces: Iterable[BlockHash]) -> dict[BlockHash, tuple[str, ...]]:
        """Names of the tenants who share each salted form of ``namespaces``; none for a client's own salt."""
        roots = list(namespaces)
        return {salted(root, salt): tuple(names) for salt, names in self._tenants.items() for root in roots}
