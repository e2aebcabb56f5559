"""``serveConfigV2`` as strictly as it can be read: Serve ignores keys that it does not know.

The arguments are read by the very function that the cluster calls; secrets that would come from the environment are
left out. Each replica must fit into some worker group.
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

from ...actors.placement import could_fit
from ...cluster.application_args import read_models
from ...cluster.config import WarmrootConfig
from ...cluster.errors import ConfigError
from ..app import gang_bundles, replica_deployments
from ..serve_config import IMPORT_PATH, INGRESS_DEPLOYMENT
from .pods import groups
from .tools import Manifest

Keys = Mapping[str, Any]


def problems(manifests: Sequence[Manifest]) -> list[str]:
    """Of every RayService."""
    return [
        f"{service['metadata']['name']}: serveConfigV2: {problem}"
        for service in manifests
        if service.get("kind") == "RayService"
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
    for deployment in application.get("deployments", []):
        yield from _deployment(deployment, deployments)
    for config in configs:
        yield from _fits(config, service)


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


def _fits(config: WarmrootConfig, service: Manifest) -> Iterator[str]:
    """Whether some group has nodes for each stage, and as many of them as there are stages."""
    name, topology = config.model.names[0], config.parallel.topology()
    if config.deploy.threads_per_replica is None:
        yield f"{name}: threads_per_replica is needed: whoever starts the replicas cannot see the nodes' cores"
        return
    selector = config.deploy.label_selector
    nodes: dict[str, Mapping[str, float]] = {}
    for group_name, group in groups(service)[1:]:
        if selector.items() <= group.get("labels", {}).items():
            nodes[group_name] = _node(group)
    bundles = gang_bundles(config)
    if not could_fit(bundles, nodes):
        yield f"{name}: a replica needs {bundles[0]} on a node with labels {selector}; there are {nodes or 'none'}"
    if topology.pp > 1 and not any(group.get("numOfHosts", 1) % topology.pp == 0 for _, group in groups(service)[1:]):
        yield f"{name}: {topology.pp} stages need a group whose hosts are a multiple of {topology.pp}"


def _node(group: Manifest) -> Mapping[str, float]:
    """Resources of one of its nodes, as Ray counts them."""
    limits = group["template"]["spec"]["containers"][0]["resources"]["limits"]
    gpus = sum(float(amount) for name, amount in limits.items() if "gpu" in name)
    return {"CPU": _cpus(str(limits["cpu"])), "GPU": gpus}


def _cpus(text: str) -> float:
    """Ray rounds a fraction up."""
    return float(-int(-(float(text[:-1]) / 1000 if text.endswith("m") else float(text)) // 1))
