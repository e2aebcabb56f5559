"""Objects that Kubernetes itself knows, and the pod templates of a RayService as pods, against Kubernetes's schemas."""

import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import yaml

from .custom_resources import OF_KUBERNETES
from .tools import Manifest, Tools

VERSIONS = ("1.31", "1.37")
"""Of Kubernetes."""


def problems(tools: Tools, manifests: Sequence[Manifest], version: str) -> list[str]:
    """What a cluster of that version of Kubernetes would refuse or drop."""
    known = [manifest for manifest in manifests if manifest.get("apiVersion") in OF_KUBERNETES]
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        yaml.safe_dump_all([*known, *pods(manifests)], file, sort_keys=False)
        file.flush()
        return tools.problems("kubernetes-validate", "--strict", "--quiet", "-k", version, Path(file.name))


def pods(manifests: Sequence[Manifest]) -> Iterator[Manifest]:
    """A pod for the head and for each group of every RayService."""
    for manifest in manifests:
        if manifest.get("kind") != "RayService":
            continue
        for name, group in groups(manifest):
            template = group["template"]
            metadata = {**template.get("metadata", {}), "name": f"{manifest['metadata']['name']}-{name}"}
            yield {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": template["spec"]}


def groups(service: Manifest) -> list[tuple[str, Manifest]]:
    """(name, group) of the head and of each worker group."""
    cluster = service["spec"]["rayClusterConfig"]
    return [
        ("head", cluster["headGroupSpec"]),
        *((group["groupName"], group) for group in cluster.get("workerGroupSpecs", [])),
    ]
