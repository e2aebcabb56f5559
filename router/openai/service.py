"""What the routes share: the served models, the cluster's state, settings, clocks and ids."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from secrets import token_hex

from ...cluster.errors import ModelNotFoundError, ReplicaUnavailableError
from ..frontend import Frontend
from ..metrics import RequestMetrics
from .cluster_state import ClusterState, ReplicaState
from .settings import ApiSettings


def random_id() -> str:
    """32 hexadecimal digits."""
    return token_hex(16)


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """One ingress. ``frontends`` maps served names to models and may grow while the API runs."""

    frontends: Mapping[str, Frontend]
    cluster: ClusterState
    metrics: RequestMetrics
    settings: ApiSettings
    version: str
    clock: Callable[[], float] = time.time
    """Wall clock, in seconds."""
    monotonic: Callable[[], float] = time.perf_counter
    new_id: Callable[[], str] = random_id

    @property
    def fingerprint(self) -> str:
        """``system_fingerprint``: changes with the software that answers."""
        return f"warmroot-{self.version}"

    def model(self, name: str | None, param: str | None = "model") -> tuple[str, Frontend]:
        """The served name and its model; without a name, the first.

        Raises ModelNotFoundError, and ReplicaUnavailableError before the model is up.
        """
        if not self.frontends:
            raise ReplicaUnavailableError("no model is ready yet")
        if name is None:
            return next(iter(self.frontends.items()))
        frontend = self.frontends.get(name)
        if frontend is None and name in self.settings.served_names:
            raise ReplicaUnavailableError(f"the model '{name}' is not ready yet")
        if frontend is None:
            raise ModelNotFoundError(f"the model '{name[:200]}' does not exist", param=param)
        return name, frontend

    def ready(self) -> bool:
        """Whether a request could be served now."""
        return bool(self.frontends) and any(r.state is ReplicaState.READY for r in self.cluster.replicas())
