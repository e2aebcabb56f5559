"""The Serve config of an application: what KubeRay takes as ``serveConfigV2``, and ``serve deploy`` as a file."""

from typing import Any

from ..cluster.application_args import HTTP_OPTIONS, application_args
from ..cluster.autoscaling_config import AutoscalingConfig
from ..cluster.config import WarmrootConfig

APP_NAME = "warmroot"
INGRESS_DEPLOYMENT = "Ingress"
REPLICA_DEPLOYMENT = "Replica"
IMPORT_PATH = "warmroot.deploy.app:build_app"
SCALING_POLICY = "warmroot.deploy.autoscaling:ScalingPolicy"
SEVERAL = 2
"""Ingresses, as an argument: another number of several leaves the application as it is."""
ANY_ADDRESS = "0.0.0.0"
"""In a cluster the endpoint is for others, unless a host is given."""


def serve_config(config: WarmrootConfig, name: str = APP_NAME) -> dict[str, Any]:
    """As plain values. Raises ConfigError for keys that do not belong there, such as secrets.

    Numbers of copies, and what they follow, stand beside the deployments: Serve builds an application with other
    arguments anew, while other numbers only add or remove copies.
    """
    server = config.server
    options = {key: getattr(server, key) for key in HTTP_OPTIONS if key in server.model_fields_set}
    copies = {INGRESS_DEPLOYMENT: {"num_replicas": server.num_ingress}, REPLICA_DEPLOYMENT: copies_of(config)}
    application = {
        "name": name,
        "route_prefix": server.root_path or "/",
        "import_path": IMPORT_PATH,
        "args": _args(config),
        "deployments": [{"name": deployment, **number} for deployment, number in copies.items()],
    }
    return {
        "proxy_location": "EveryNode",
        "http_options": {"host": ANY_ADDRESS, "port": server.port, **options},
        "applications": [application],
    }


def copies_of(config: WarmrootConfig) -> dict[str, Any]:
    """Options of a deployment of replicas: how many there are, or what their number follows.

    The policy has delays of its own, so Serve's are 0. There is no number to begin with: Serve would go back to it
    whenever the configuration changes.
    """
    scaling = config.autoscaling
    if scaling.max_replicas is None:
        return {"num_replicas": config.deploy.num_replicas}
    keys = {"model": config.model.names[0], **scaling.model_dump(exclude_unset=True)}
    if "replica_start_timeout" in config.limits.model_fields_set:
        keys["replica_start_timeout"] = config.limits.replica_start_timeout
    return {
        "autoscaling_config": {
            "min_replicas": scaling.min_replicas,
            "max_replicas": scaling.max_replicas,
            "upscale_delay_s": 0.0,
            "downscale_delay_s": 0.0,
            "policy": {"policy_function": SCALING_POLICY, "policy_kwargs": keys},
        }
    }


def _args(config: WarmrootConfig) -> dict[str, Any]:
    """Without numbers of copies. Ingresses have to know whether they are several, which share quotas and count apart,
    and that there may be none of the model.
    """
    scaling = AutoscalingConfig.model_fields
    args = {
        key: value
        for key, value in application_args(config).items()
        if key not in ("num_ingress", "num_replicas") and key not in scaling
    }
    if config.server.num_ingress > 1:
        args["num_ingress"] = SEVERAL
    return args if config.autoscaling.min_replicas else {**args, "min_replicas": 0, "max_replicas": 1}
