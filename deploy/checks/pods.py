"""Objects that Kubernetes itself knows, and the pod templates of a RayService as pods, against Kubernetes's schemas."""

import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import yaml

from .custom_resources import OF_KUBERNETES
from .tools import Manifest, Tools, name_of

VERSIONS = ("1.31", "1.37")
"""Of Kubernetes."""
DRAIN_VARIABLE = "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"
"""How long a node may finish its streams, by Ray."""


def problems(tools: Tools, manifests: Sequence[Manifest], version: str) -> list[str]:
    """What a cluster of that version of Kubernetes would refuse or drop."""
    known = [manifest for manifest in manifests if manifest.get("apiVersion") in OF_KUBERNETES]
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        yaml.safe_dump_all([*known, *pods(manifests)], file, sort_keys=False)
        file.flush()
        return tools.problems("kubernetes-validate", "--strict", "--quiet", "-k", version, Path(file.name))


def pods(manifests: Sequence[Manifest]) -> Iterator[Manifest]:
    """A pod for the head and for each group of every RayService."""
    for service in services(manifests):
        for name, group in groups(service):
            template = group["template"]
            metadata = {**template.get("metadata", {}), "name": f"{service['metadata']['name']}-{name}"}
            yield {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": template["spec"]}


def services(manifests: Sequence[Manifest]) -> list[Manifest]:
    """The RayServices."""
    return [manifest for manifest in manifests if manifest.get("kind") == "RayService"]


def groups(service: Manifest) -> list[tuple[str, Manifest]]:
    """(name, group) of the head and of each worker group."""
    cluster = service["spec"]["rayClusterConfig"]
    return [
        ("head", cluster["headGroupSpec"]),
        *((group["groupName"], group) for group in cluster.get("workerGroupSpecs", [])),
    ]


def all_pods(manifests: Sequence[Manifest]) -> dict[str, Manifest]:
    """Every pod that a release starts, as metadata and spec, by a name for messages: Ray's, and those of workloads."""
    found = {name_of(pod): pod for pod in pods(manifests)}
    for manifest in manifests:
        if manifest.get("kind") == "Pod":
            found[name_of(manifest)] = manifest
        elif "template" in manifest.get("spec", {}):
            found[name_of(manifest)] = manifest["spec"]["template"]
    return found


def ray_pods(manifests: Sequence[Manifest]) -> dict[str, Manifest]:
    """Those of the RayServices, as ``all_pods`` names them."""
    return {name_of(pod): pod for pod in pods(manifests)}


def containers(pod: Manifest) -> list[Manifest]:
    """Those of a pod, with those that prepare it."""
    return [*pod["spec"]["containers"], *pod["spec"].get("initContainers", [])]


def variables(container: Manifest) -> dict[str, str | None]:
    """Those of a container; None for what comes from elsewhere."""
    return {one["name"]: one.get("value") for one in container.get("env", [])}
