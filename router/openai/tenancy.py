"""Keys, limits and audit log of an ingress, as its settings ask for them."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ...kv_store.quota import QuotaStore
from ..json_lines import JsonLines
from ..tenancy.key_ring import HeldKey, KeyRing, digest_of
from ..tenancy.key_store import KeyStore
from ..tenancy.metrics import TenancyCollector
from ..tenancy.principal import Principal
from ..tenancy.rate_limits import RateLimiter
from .settings import ApiSettings


@dataclass(frozen=True, slots=True)
class Tenancy:
    """What the middleware stands on."""

    keys: KeyStore
    limiter: RateLimiter
    audit: JsonLines | None

    @classmethod
    def of(
        cls,
        settings: ApiSettings,
        *,
        clock: Callable[[], float],
        monotonic: Callable[[], float],
        shared_quota: QuotaStore | None = None,
    ) -> "Tenancy":
        """Raises ConfigError for a file of API keys that cannot be read."""
        path = None if settings.api_keys_file is None else Path(settings.api_keys_file)
        return cls(
            KeyStore(_fixed_keys(settings), path, clock=clock, monotonic=monotonic),
            RateLimiter(monotonic, shared_quota, settings.num_ingress),
            None if settings.audit_log is None else JsonLines(settings.audit_log, "audit log", monotonic),
        )

    def collector(self) -> TenancyCollector:
        """Their metrics."""
        return TenancyCollector(self.keys, self.limiter, self.audit)


def _fixed_keys(settings: ApiSettings) -> KeyRing:
    """Those of flags and environment, which have no limits. They are named after where they stand."""
    keys = {
        digest_of(key.key.get_secret_value()): HeldKey(Principal(tenant=key.tenant, name=f"flag-{place}"))
        for place, key in enumerate(settings.api_keys, 1)
    }
    admins = {
        digest_of(key.get_secret_value()): HeldKey(Principal(name=f"admin-flag-{place}", is_admin=True))
        for place, key in enumerate(settings.admin_keys, 1)
    }
    return KeyRing({**keys, **admins})
