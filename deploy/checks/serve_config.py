"""``serveConfigV2`` as strictly as it can be read: Serve ignores keys that it does not know.

The arguments are read by the very function that the cluster calls; secrets that would come from the environment are
left out.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import yaml
from pydantic import BaseModel, ValidationError
from ray.serve.config import AutoscalingConfig
from ray.serve.schema import (
    DeploymentSchema,
    HTTPOptionsSchema,
    RayActorOptionsSchema,
    ServeApplicationSchema,
    ServeDeploySchema,
)

from ...cluster.application_args import read_models
from ...cluster.config import WarmrootConfig
from ...cluster.errors import ConfigError
from ..app import replica_deployments
from ..serve_config import IMPORT_PATH, INGRESS_DEPLOYMENT
from . import capacity
from .pods import DRAIN_VARIABLE, groups, services, variables
from .tools import Manifest

Keys = Mapping[str, Any]


def problems(manifests: Sequence[Manifest]) -> list[str]:
    """Of every RayService."""
    return [
        f"{service['metadata']['name']}: serveConfigV2: {problem}"
        for service in services(manifests)
        for problem in _problems(service)
    ]


def _problems(service: Manifest) -> Iterator[str]:
    try:
        config = yaml.safe_load(service["spec"]["serveConfigV2"])
        ServeDeploySchema.model_validate(config)
    except yaml.YAMLError as error:
        yield f"not valid YAML: {error}"
        return
    except ValidationError as error:
        yield from (f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors())
        return
    if config.get("proxy_location", "EveryNode") != "EveryNode":
        yield "proxy_location: must be EveryNode: the operator waits for a proxy on each worker that serves"
    yield from _unknown(config, ServeDeploySchema, "")
    yield from _unknown(config.get("http_options", {}), HTTPOptionsSchema, "http_options.")
    for application in config["applications"]:
        yield from _unknown(application, ServeApplicationSchema, f"{application['name']}.")
        yield from _application(application, service)


def _application(application: Keys, service: Manifest) -> Iterator[str]:
    if application["import_path"] != IMPORT_PATH:
        yield f"{application['name']}.import_path: must be {IMPORT_PATH}"
        return
    try:
        configs = read_models(application.get("args", {}), {})
        deployments = [INGRESS_DEPLOYMENT, *replica_deployments(configs)]
    except ConfigError as error:
        yield f"{application['name']}.args: {error.message}"
        return
    given = {one["name"]: one for one in application.get("deployments", [])}
    for deployment in given.values():
        yield from _deployment(deployment, deployments)
    yield from _ingress(given.get(INGRESS_DEPLOYMENT, {}), service)
    for config in configs:
        yield from _grace(config, service)
    copies = [_most(given.get(name, {}), config) for name, config in zip(deployments[1:], configs, strict=True)]
    yield from capacity.problems(configs, copies, service)


def _most(deployment: Keys, config: WarmrootConfig) -> int:
    """Copies that there may be."""
    scaling: Keys = deployment.get("autoscaling_config") or {}
    return scaling.get("max_replicas") or deployment.get("num_replicas") or config.most_replicas


def _ingress(deployment: Keys, service: Manifest) -> Iterator[str]:
    """It must find nodes, and none with a GPU: it would hold a node that autoscaling gives back."""
    selector = deployment.get("ray_actor_options", {}).get("label_selector") or {}
    nodes = {name: group for name, group in groups(service)[1:] if selector.items() <= group.get("labels", {}).items()}
    if not nodes:
        yield f"{INGRESS_DEPLOYMENT}: no group has nodes with the labels {selector}"
    for name, group in nodes.items():
        limits = group["template"]["spec"]["containers"][0]["resources"].get("limits", {})
        if any("gpu" in resource for resource in limits):
            yield f"{INGRESS_DEPLOYMENT}: would hold nodes with GPUs, of the group {name}: give it a label_selector"


def _grace(config: WarmrootConfig, service: Manifest) -> Iterator[str]:
    """Pods must live for as long as requests may go on in them."""
    grace, longest, name = config.limits.shutdown_grace, config.limits.request_timeout, config.model.names[0]
    if longest > grace:
        yield f"{name}: a request may take {longest:g} s (request_timeout), and a pod that is to go {grace:g} s"
    for group_name, group in groups(service)[1:]:
        drain = variables(group["template"]["spec"]["containers"][0]).get(DRAIN_VARIABLE)
        if drain is not None and float(drain) < grace:
            yield f"{name}: shutdown_grace is {grace:g} s, but the nodes of {group_name} end after {drain} s"


def _deployment(deployment: Keys, known: Sequence[str]) -> Iterator[str]:
    where = f"{deployment['name']}."
    if deployment["name"] not in known:
        yield f"{where} there is no such deployment; there are {', '.join(known)}"
    yield from _unknown(deployment, DeploymentSchema, where)
    yield from _unknown(deployment.get("ray_actor_options", {}), RayActorOptionsSchema, f"{where}ray_actor_options.")
    autoscaling = deployment.get("autoscaling_config")
    if isinstance(autoscaling, Mapping):
        yield from _unknown(cast(Keys, autoscaling), AutoscalingConfig, f"{where}autoscaling_config.")
        try:
            AutoscalingConfig.model_validate(autoscaling)
        except ValidationError as error:
            yield f"{where}autoscaling_config: {error.errors()[0]['msg']}"


def _unknown(given: Keys, schema: type[BaseModel], where: str) -> Iterator[str]:
    yield from (f"{where}{key}: unknown key" for key in given if key not in schema.model_fields)
