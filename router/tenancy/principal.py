"""Whom a request comes from, and what he may do: ``scope["state"]["principal"]``, set by the API's key check."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Principal:
    """The holder of an API key; without fields, whoever asks where no key is needed."""

    tenant: str = ""
    """Whose cached prefixes are shared with nobody else's; those without a tenant share."""
    name: str = ""
    """The key's name, for logs. Never the key."""
    models: frozenset[str] | None = None
    """Served names that it may use; None: all."""
    max_priority: int | None = None
    """The best priority it may ask for, as lower runs first; None: any."""
    share: float = 1.0
    """The tenant's weight in fair sharing."""
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    """Prompt and output tokens; None: as many as it likes."""
    is_admin: bool = False
    """May use ``/admin`` too."""
    cache_group: str = ""
    """Tenants that share cached prefixes on purpose have the same one; empty: none."""
    tenant_requests_per_minute: int | None = None
    """Limit of all keys of the tenant together."""
    tenant_tokens_per_minute: int | None = None

    def may_use(self, model: str) -> bool:
        """Whether a served name is for it."""
        return self.models is None or model in self.models

    def priority(self, wanted: int) -> int:
        """What it gets of the priority it asks for."""
        return wanted if self.max_priority is None else max(wanted, self.max_priority)

    def cache_salt(self, wanted: str | None) -> str:
        """The salt of a request's KV: the client's own, inside its tenant's or its group's.

        No client can name another tenant's: lengths keep the parts apart.
        """
        if self.cache_group:
            return f"group {len(self.cache_group)}:{self.cache_group}:{wanted or ''}"
        return f"{len(self.tenant)}:{self.tenant}:{wanted or ''}" if self.tenant or wanted else ""

    def session(self, wanted: str) -> str:
        """A session's name, made so that no other tenant's is the same."""
        return f"\0{len(self.tenant)}:{self.tenant}:{wanted}" if self.tenant and wanted else wanted.lstrip("\0")
