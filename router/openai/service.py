"""What the routes share: the served models, the cluster's state, settings, clocks and ids."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from secrets import token_hex

from ...cluster.errors import ModelNotFoundError, ReplicaUnavailableError
from ..frontend import Frontend
from ..metrics import RequestMetrics
from ..tenancy.principal import Principal
from ..weights_updater import WeightsUpdater
from .cluster_state import ClusterState, ReplicaState
from .grammar_checks import GrammarChecks
from .large_texts import LargeTexts
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
    texts: LargeTexts = field(default_factory=LargeTexts)
    grammars: GrammarChecks = field(default_factory=GrammarChecks)
    updaters: Mapping[str, WeightsUpdater] = field(default_factory=dict[str, WeightsUpdater])
    """Who changes models' weights, by served name as ``frontends``."""

    @property
    def fingerprint(self) -> str:
        """``system_fingerprint``: changes with the software that answers."""
        return f"warmroot-{self.version}"

    def model(self, name: str | None, principal: Principal, param: str | None = "model") -> tuple[str, Frontend]:
        """The served name and its model; without a name, the first that is for ``principal``.

        Raises ModelNotFoundError, and ReplicaUnavailableError before the model is up. A model that is not for
        ``principal`` does not exist for it.
        """
        if not self.frontends:
            raise ReplicaUnavailableError("no model is ready yet")
        if name is None:
            served = self.models(principal)
            if not served:
                raise ModelNotFoundError("none of the models that are up is for this key", param=param)
            return next(iter(served.items()))
        frontend = self.frontends.get(name)
        if not principal.may_use(name) or (frontend is None and name not in self.settings.served_names):
            raise ModelNotFoundError(f"the model '{name[:200]}' does not exist", param=param)
        if frontend is None:
            raise ReplicaUnavailableError(f"the model '{name}' is not ready yet")
        return name, frontend

    def models(self, principal: Principal) -> dict[str, Frontend]:
        """Those that are up and for ``principal``, by served name."""
        return {name: frontend for name, frontend in self.frontends.items() if principal.may_use(name)}

    def ready(self) -> bool:
        """Whether a request would be served: now, or by a replica that starts for it."""
        return bool(self.frontends) and (self.settings.waits_for_replicas or self.has_replica())

    def has_replica(self, model: str | None = None) -> bool:
        """Whether some replica, or one of ``model``, takes requests now."""
        return any(
            replica.state is ReplicaState.READY and model in (None, replica.info.model)
            for replica in self.cluster.replicas()
        )
