"""The Serve application: an ingress deployment in front of deployments of replicas, one for each model."""

import os
import re
import secrets
from collections.abc import Sequence
from typing import Any, cast

import ray
from ray import serve
from ray.serve.handle import DeploymentHandle

from ..actors.ingress import Ingress
from ..actors.placement import stage_bundles, strategy
from ..actors.replica import Replica
from ..cluster.application_args import read_models
from ..cluster.config import ModelConfig, WarmrootConfig
from ..cluster.errors import ConfigError
from .channel_token import channel_token
from .serve_config import APP_NAME, INGRESS_DEPLOYMENT, REPLICA_DEPLOYMENT, copies_of

REQUEST_ROUTER = "warmroot.router.serve_router.WarmrootRequestRouter"
HEALTH_CHECKS = {"health_check_period_s": 1, "health_check_timeout_s": 10}
"""An actor that has ended is replaced once a check finds out; one that hangs, after three that were not answered."""


def build_app(args: dict) -> serve.Application:  # Serve looks whether the annotation is a class of its own
    """What a Serve config names as its ``import_path``: ``args`` are configuration keys, as ``read_models`` reads them.

    Secrets come from the environment. Raises ConfigError.
    """
    return application(read_models(args, os.environ))


def application(
    configs: Sequence[WarmrootConfig], *, single_node: bool = False, open_admin: bool = False
) -> serve.Application:
    """Replicas of every model, and ingresses as the first one's configuration asks for. Run it with ``serve.run``.

    ``single_node`` keeps the replicas' channels on loopback: no other machine will ever need them. ``open_admin``: only
    this machine reaches the API, so that ``/admin`` may be open where there are no keys.
    """
    first, token, build = configs[0], channel_token(), secrets.token_hex(8)
    channel_host = "127.0.0.1" if single_node else None
    # A replica sets its threads itself: with a runtime environment Ray could not use a worker that it has ready.
    configs = [_with_threads(config) for config in configs]
    replicas = [
        _replicas(name, config).bind(config, token, channel_host, build)
        for name, config in zip(replica_deployments(configs), configs, strict=True)
    ]
    ingress = _deployment(
        serve.ingress()(Ingress),
        name=INGRESS_DEPLOYMENT,
        num_replicas=first.server.num_ingress,
        max_ongoing_requests=100_000,
        ray_actor_options={"num_cpus": 0},
        **HEALTH_CHECKS,
        graceful_shutdown_timeout_s=first.limits.shutdown_grace,
    )
    models = [config for at, config in enumerate(configs) if all(config.model != c.model for c in configs[:at])]
    return ingress.bind(models, replicas, token, open_admin, build)


def replica_deployments(configs: Sequence[WarmrootConfig]) -> list[str]:
    """The deployment of each entry's replicas: ``Replica``, or ``Replica-NAME`` where there are several entries.

    Further groups of one model's replicas are numbered: ``Replica-NAME-2``. Raises ConfigError when two names are too
    much alike.
    """
    if len(configs) == 1:
        return [REPLICA_DEPLOYMENT]
    models: dict[str, ModelConfig] = {}
    names: list[str] = []
    for config in configs:
        name = f"{REPLICA_DEPLOYMENT}-{re.sub(r'[^A-Za-z0-9]+', '-', config.model.names[0]).strip('-')}"
        if models.setdefault(name, config.model) != config.model:
            message = f"served_model_name: two models would be the deployment {name}; give them other names"
            raise ConfigError(message, param="served_model_name")
        group = 1 + sum(config.model == other.model for other in configs[: len(names)])
        if group > 1 and any(one.autoscaling.max_replicas and one.model == config.model for one in configs):
            message = f"max_replicas: {config.model.names[0]} has several groups of replicas: their sizes are fixed"
            raise ConfigError(message, param="max_replicas")
        names.append(name if group == 1 else f"{name}-{group}")
    return names


def _replicas(name: str, config: WarmrootConfig) -> serve.Deployment:
    return _deployment(
        Replica,
        name=name,
        **copies_of(config),
        # The engine queues and refuses by itself; Serve's own limit only matters to plain handles.
        max_ongoing_requests=config.scheduler.max_num_seqs + config.scheduler.max_num_queued_reqs,
        **replica_resources(config),
        request_router_config={
            "request_router_class": REQUEST_ROUTER,
            "request_router_kwargs": {"policy": config.routing.routing_policy},
        },
        **HEALTH_CHECKS,
        # Serve waits for plain handles only; what is left of the grace is for the requests of the ingress.
        graceful_shutdown_wait_loop_s=0.1,
        graceful_shutdown_timeout_s=config.limits.shutdown_grace,
    )


def _with_threads(config: WarmrootConfig) -> WarmrootConfig:
    deploy = config.deploy.model_copy(update={"threads_per_replica": replica_threads(config)})
    return config.model_copy(update={"deploy": deploy})


def _deployment(body: Any, **options: Any) -> serve.Deployment:
    """``serve.deployment``, whose own annotations tell only of the decorator form."""
    return cast(Any, serve.deployment)(body, **options)


def replica_threads(config: WarmrootConfig) -> int:
    """CPU threads of each replica: as asked, or the machine's cores shared among its replicas; one a rank at least."""
    threads = config.deploy.threads_per_replica or (os.cpu_count() or 1) // config.most_replicas
    return max(threads, config.parallel.topology().world_size)


def gang_bundles(config: WarmrootConfig) -> list[dict[str, float]]:
    """What each stage of a replica takes of a node."""
    topology = config.parallel.topology()
    rank = {"CPU": float(replica_threads(config) // topology.world_size), "GPU": float(_gpus(config))}
    return stage_bundles(topology, rank)


def replica_resources(config: WarmrootConfig) -> dict[str, Any]:
    """Options of the deployment: what a replica takes, or a placement group for the gang that it only leads."""
    topology, labels = config.parallel.topology(), config.deploy.label_selector
    if topology.world_size == 1:
        options = {"num_cpus": replica_threads(config), "num_gpus": _gpus(config)}
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


def _gpus(config: WarmrootConfig) -> int:
    """For each rank; Ray hides GPUs from actors that ask for none."""
    if config.deploy.device != "auto":
        return int(config.deploy.device == "cuda")
    return int(ray.is_initialized() and ray.cluster_resources().get("GPU", 0) >= 1)
