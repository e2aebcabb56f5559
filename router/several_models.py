"""The state of a cluster that serves several models: what the dispatcher of each tells, put together."""

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import chain, islice, zip_longest

from ..cluster.histogram import merged
from ..cluster.scaling_status import ScalingStatus
from .openai.cluster_state import (
    DECISION_S,
    LAG_S,
    WAIT_S,
    ClusterState,
    OwnedPrefix,
    ReplicaStatus,
    RouterStatus,
    RoutingChoice,
    RoutingStats,
    ScalingStep,
    StoreStatus,
)


class SeveralModels:
    """``ClusterState`` over the states of single models, which may become more while it is in use."""

    def __init__(self, states: Sequence[ClusterState]) -> None:
        self._states = states

    def replicas(self) -> list[ReplicaStatus]:
        """See ``ClusterState``."""
        return [replica for state in self._states for replica in state.replicas()]

    def routing(self) -> RoutingStats:
        """See ``ClusterState``."""
        stats = [state.routing() for state in self._states]
        decisions: Counter[tuple[str, str]] = Counter()
        for one in stats:
            decisions.update(one.decisions)
        return RoutingStats(
            decisions=decisions,
            predicted_hit_tokens=sum(one.predicted_hit_tokens for one in stats),
            actual_hit_tokens=sum(one.actual_hit_tokens for one in stats),
            best_hit_tokens=sum(one.best_hit_tokens for one in stats),
            colder_choices=sum(one.colder_choices for one in stats),
            decision_s=merged(DECISION_S, (one.decision_s for one in stats)),
            wait_s=merged(WAIT_S, (one.wait_s for one in stats)),
            reservations=sum(one.reservations for one in stats),
            reserved_tokens=sum(one.reserved_tokens for one in stats),
            event_lag_s=merged(LAG_S, (one.event_lag_s for one in stats)),
            joined=sum((Counter(one.joined) for one in stats), Counter[str]()),
            gone=sum((Counter(one.gone) for one in stats), Counter[str]()),
            warm_ups=sum(one.warm_ups for one in stats),
            migrations=sum((Counter(one.migrations) for one in stats), Counter[str]()),
            recomputed_tokens=sum(one.recomputed_tokens for one in stats),
            waiting=sum(one.waiting for one in stats),
            waiting_tokens=sum(one.waiting_tokens for one in stats),
            refused=sum((Counter(one.refused) for one in stats), Counter[str]()),
            promises=sum((Counter(one.promises) for one in stats), Counter[str]()),
        )

    def explain(self, request_id: str = "", limit: int = 1) -> list[RoutingChoice]:
        """See ``ClusterState``; the models take turns."""
        turns: Iterable[tuple[RoutingChoice | None, ...]] = zip_longest(
            *(state.explain(request_id, limit) for state in self._states)
        )
        return list(islice(filter(None, chain.from_iterable(turns)), limit))

    def routers(self) -> list[RouterStatus]:
        """See ``ClusterState``."""
        return [router for state in self._states for router in state.routers()]

    def prefixes(self, limit: int) -> list[OwnedPrefix]:
        """See ``ClusterState``; each model has an equal part."""
        share = limit // max(1, len(self._states))
        return [prefix for state in self._states for prefix in state.prefixes(share)]

    def scaling(self) -> list[ScalingStep]:
        """See ``ClusterState``."""
        steps = chain.from_iterable(state.scaling() for state in self._states)
        return sorted(steps, key=lambda step: -step.at)

    def autoscalers(self) -> list[ScalingStatus]:
        """See ``ClusterState``."""
        return [status for state in self._states for status in state.autoscalers()]

    def store(self) -> StoreStatus:
        """See ``ClusterState``. All models share the store; each has an index of its own."""
        stores = [state.store() for state in self._states]
        if not stores:
            return StoreStatus()
        return StoreStatus(
            store=stores[0].store,
            fault=next((one.fault for one in stores if one.fault), ""),
            index_blocks=sum(one.index_blocks for one in stores),
            gaps=sum(one.gaps for one in stores),
            skipped=sum(one.skipped for one in stores),
            conflicts=sum(one.conflicts for one in stores),
            resyncs=sum(one.resyncs for one in stores),
            silent=sum(one.silent for one in stores),
        )
