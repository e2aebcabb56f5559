"""Puts ``AdminState`` together from what the ingress knows."""

import os
import socket
from collections import ChainMap
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any

from ...cluster.histogram import HistogramCounts
from ...cluster.scaling_status import ScalingStatus
from ...kv_store.hashing import unpack_tokens
from ..recent import Figures, quantile
from ..tokenizer import Tokenizer
from ..weights_updater import WeightsUpdater
from .admin_state import (
    AdminState,
    AutoscalerBody,
    DecisionBody,
    FiguresBody,
    IngressBody,
    PrefixBody,
    ReplicaBody,
    RouterBody,
    ScalingBody,
    StoreBody,
    TotalsBody,
    UpdateBody,
)
from .cluster_state import OwnedPrefix, ReplicaStatus, RouterStatus, RoutingChoice, RoutingStats, StoreStatus
from .service import Service

MOST_CANDIDATES = 8
"""Of a decision, that are listed."""
MOST_STEPS = 50
_MOST_CHARACTERS = 120
"""Of a prefix, that are shown."""


def report(service: Service, *, prefixes: int, decisions: int) -> AdminState:
    """At most so many nodes and decisions."""
    cluster = service.cluster
    replicas, stats, routers = cluster.replicas(), cluster.routing(), cluster.routers()
    running = sum(replica.load.running for replica in replicas)
    waiting = sum(replica.load.waiting for replica in replicas)
    total = sum((router.figures for router in routers), Figures())
    hit_rates = ChainMap(*(dict(router.hit_rates) for router in routers))
    tokenizers = {frontend.model: frontend.tokenizer for frontend in service.frontends.values()}
    previews = service.settings.prompt_previews
    return AdminState(
        version=service.version,
        at=service.clock(),
        ready=service.ready(),
        models=list(service.frontends),
        server_load=running + waiting,
        ingress=IngressBody(host=socket.gethostname(), pid=os.getpid()),
        totals=TotalsBody(**_figures(total), running=running, waiting=waiting + stats.waiting),
        routers=[_router(router) for router in routers],
        routing=_counts(stats),
        metadata_store=_store(cluster.store(), stats.event_lag_s),
        replicas=[_replica(replica, hit_rates) for replica in replicas],
        updates=_updates(service.updaters),
        previews=previews,
        prefixes=[_prefix(prefix, tokenizers, previews) for prefix in cluster.prefixes(prefixes)],
        decisions=[_decision(choice) for choice in cluster.explain("", decisions)],
        autoscalers=[_autoscaler(status) for status in cluster.autoscalers()],
        scaling=[ScalingBody(**asdict(step)) for step in cluster.scaling()[:MOST_STEPS]],
    )


def _figures(figures: Figures) -> dict[str, Any]:
    """The fields of ``FiguresBody``."""
    prompt_tokens, span_s = figures.prompt_tokens, figures.span_s
    return {
        "span_s": span_s,
        "requests_per_s": figures.started / span_s,
        "failed_per_s": figures.failed / span_s,
        "output_tokens_per_s": figures.output_tokens / span_s,
        "hit_rate": figures.cached_tokens / prompt_tokens if prompt_tokens else None,
        "ttft_p50_s": quantile(figures.ttft, 0.5),
        "ttft_p95_s": quantile(figures.ttft, 0.95),
        "itl_p50_s": quantile(figures.itl, 0.5),
        "itl_p95_s": quantile(figures.itl, 0.95),
    }


def _router(router: RouterStatus) -> RouterBody:
    return RouterBody(
        name=router.name,
        model=router.model,
        is_own=router.is_own,
        in_flight=router.in_flight,
        silent_s=router.silent_s,
        figures=FiguresBody(**_figures(router.figures)),
    )


def _counts(stats: RoutingStats) -> dict[str, Any]:
    """Plain counts; histograms are in the metrics."""
    return {
        "decisions": [
            {"policy": policy, "reason": reason, "count": count} for (policy, reason), count in stats.decisions.items()
        ],
        "predicted_hit_tokens": stats.predicted_hit_tokens,
        "actual_hit_tokens": stats.actual_hit_tokens,
        "best_hit_tokens": stats.best_hit_tokens,
        "warm_ups": stats.warm_ups,
        "recomputed_tokens": stats.recomputed_tokens,
        "migrations": dict(stats.migrations),
        "refused": dict(stats.refused),
        "waiting": stats.waiting,
        "waiting_tokens": stats.waiting_tokens,
    }


def _store(status: StoreStatus, lag: HistogramCounts) -> StoreBody:
    return StoreBody(**asdict(status), lag_p50_s=_bound(lag, 0.5), lag_p95_s=_bound(lag, 0.95))


def _bound(histogram: HistogramCounts, share: float) -> float | None:
    """The bound under which that share of the values lies."""
    left = share * histogram.num_values
    if not left:
        return None
    for bound, count in zip(histogram.bounds, histogram.counts, strict=False):
        left -= count
        if left <= 0:
            return bound
    return None


def _replica(replica: ReplicaStatus, hit_rates: Mapping[Any, float]) -> ReplicaBody:
    """Its facts and load; ``ranks`` is empty where its model runs in its own process."""
    facts = {key: value for key, value in asdict(replica.info).items() if key != "kv_namespace"}
    load = replica.load
    facts |= {
        "state": replica.state.value,
        "running": load.running,
        "waiting": load.waiting,
        "waiting_tokens": load.waiting_tokens,
        "kv_used_blocks": load.kv_used_blocks,
        "kv_cache_usage": load.kv_usage,
        "cached_blocks": replica.counts.cached_blocks,
        "hit_rate": hit_rates.get(replica.info.replica),
    }
    return ReplicaBody.model_validate(facts)


def _updates(updaters: Mapping[str, WeightsUpdater]) -> list[UpdateBody]:
    """A model that has several names is named by the first."""
    names = {updater: name for name, updater in reversed(list(updaters.items()))}
    return [UpdateBody(model=name, stage=updater.stage) for updater, name in names.items() if updater.stage]


def _autoscaler(status: ScalingStatus) -> AutoscalerBody:
    latest = status.latest
    return AutoscalerBody(
        model=status.model,
        at=latest.at,
        ready=latest.ready,
        target=latest.target,
        needed=latest.needed,
        signal=latest.signal,
        reasons=list(latest.reasons),
    )


def _prefix(prefix: OwnedPrefix, tokenizers: Mapping[str, Tokenizer], previews: str) -> PrefixBody:
    node = prefix.node
    shown = previews == "all" or (previews == "shared" and not prefix.is_private)
    tokenizer = tokenizers.get(prefix.model) if shown else None
    return PrefixBody(
        id=node.id,
        parent=node.parent,
        namespace=node.namespace.hex()[:12],
        model=prefix.model,
        is_private=prefix.is_private,
        tenants=list(prefix.tenants),
        depth=node.depth,
        num_tokens=node.num_tokens,
        num_children=node.num_children,
        age=node.age,
        heat=node.heat,
        replicas=list(node.replicas),
        text=None if tokenizer is None else _beginning(tokenizer, unpack_tokens(node.head)),
    )


def _beginning(tokenizer: Tokenizer, token_ids: Iterable[int]) -> str:
    """Special tokens are shown: they are what most prompts begin with."""
    known = [token_id for token_id in token_ids if 0 <= token_id < tokenizer.vocab_size]
    return tokenizer.decode(known, skip_special_tokens=False)[:_MOST_CHARACTERS]


def _decision(choice: RoutingChoice) -> DecisionBody:
    fields = {**asdict(choice), "num_candidates": len(choice.candidates)}
    return DecisionBody.model_validate({**fields, "candidates": fields["candidates"][:MOST_CANDIDATES]})
