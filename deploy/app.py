"""The Serve application: an ingress deployment in front of a deployment of replicas."""

import os
import secrets
from typing import Any, cast

import ray
from ray import serve
from ray.serve.handle import DeploymentHandle

from ..actors.ingress import Ingress
from ..actors.placement import stage_bundles, strategy
from ..actors.replica import Replica
from ..cluster.config import WarmrootConfig

APP_NAME = "warmroot"
REPLICA_DEPLOYMENT = "Replica"
REQUEST_ROUTER = "warmroot.router.serve_router.WarmrootRequestRouter"


def build_app(config: WarmrootConfig, *, single_node: bool = False) -> serve.Application:
    """Replicas and ingresses as ``config`` asks for; run it with ``serve.run`` or name it in a Serve config.

    ``single_node`` keeps the replicas' channels on loopback: no other machine will ever need them.
    """
    threads = replica_threads(config)
    replicas = _deployment(
        Replica,
        name=REPLICA_DEPLOYMENT,
        num_replicas=config.deploy.num_replicas,
        # The engine queues and refuses by itself; Serve's own limit only matters to plain handles.
        max_ongoing_requests=config.scheduler.max_num_seqs + config.scheduler.max_num_queued_reqs,
        **replica_resources(config),
        request_router_config={
            "request_router_class": REQUEST_ROUTER,
            "request_router_kwargs": {"policy": config.routing.routing_policy},
        },
        health_check_period_s=1,  # a replica that has ended is replaced once a check finds out
        graceful_shutdown_timeout_s=config.limits.shutdown_grace,
    )
    ingress = _deployment(
        serve.ingress()(Ingress),
        name="Ingress",
        num_replicas=config.server.num_ingress,
        max_ongoing_requests=100_000,
        ray_actor_options={"num_cpus": 0},
        graceful_shutdown_timeout_s=config.limits.shutdown_grace,
    )
    # A replica sets its threads itself: with a runtime environment Ray could not use a worker that it has ready.
    deploy = config.deploy.model_copy(update={"threads_per_replica": threads})
    config = config.model_copy(update={"deploy": deploy})
    channel_host = "127.0.0.1" if single_node else None
    token = secrets.token_hex(16)
    return ingress.bind(config, replicas.bind(config, token, channel_host), token)


def _deployment(body: Any, **options: Any) -> serve.Deployment:
    """``serve.deployment``, whose own annotations tell only of the decorator form."""
    return cast(Any, serve.deployment)(body, **options)


def replica_threads(config: WarmrootConfig) -> int:
    """CPU threads of each replica: as asked, or the machine's cores shared among its replicas; one a rank at least."""
    threads = config.deploy.threads_per_replica or (os.cpu_count() or 1) // config.deploy.num_replicas
    return max(threads, config.parallel.topology().world_size)


def gang_bundles(config: WarmrootConfig) -> list[dict[str, float]]:
    """What each stage of a replica takes of a node."""
    topology = config.parallel.topology()
    rank = {"CPU": float(replica_threads(config) // topology.world_size), "GPU": float(_gpus())}
    return stage_bundles(topology, rank)


def replica_resources(config: WarmrootConfig) -> dict[str, Any]:
    """Options of the deployment: what a replica takes, or a placement group for the gang that it only leads."""
    topology, labels = config.parallel.topology(), config.deploy.label_selector
    if topology.world_size == 1:
        options = {"num_cpus": replica_threads(config), "num_gpus": _gpus()}
        return {"ray_actor_options": options | ({"label_selector": labels} if labels else {})}
    return {
        "ray_actor_options": {"num_cpus": 0},
        "placement_group_bundles": gang_bundles(config),
        "placement_group_strategy": strategy(topology),
        "placement_group_bundle_label_selector": [labels] * topology.pp if labels else None,
    }


def replica_handle() -> DeploymentHandle:
    """A plain Serve handle to the replicas: slower than ``warmroot.connect()``, routed by the same policy."""
    return serve.get_deployment_handle(REPLICA_DEPLOYMENT, APP_NAME)


def _gpus() -> int:
    """For each rank: one where the cluster has any; Ray hides GPUs from actors that ask for none."""
    return int(ray.is_initialized() and ray.cluster_resources().get("GPU", 0) >= 1)
