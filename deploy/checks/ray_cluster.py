"""What KubeRay's operator refuses or silently does otherwise, though the definition of a RayService allows it."""

import re
from collections.abc import Iterator, Sequence
from importlib.metadata import version

from .pods import groups
from .tools import Manifest

_NAME = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_MOST_NAME = 47
_OWN_VARIABLES = ("RAY_REDIS_ADDRESS", "REDIS_PASSWORD", "RAY_external_storage_namespace")
_RESOURCES = ("num-cpus", "num-gpus", "memory", "resources")


def problems(manifests: Sequence[Manifest]) -> list[str]:
    """Of every RayService among ``manifests``; it is an error if there is none."""
    services = [manifest for manifest in manifests if manifest.get("kind") == "RayService"]
    found = [problem for service in services for problem in _problems(service)]
    return found if services else ["there is no RayService"]


def _problems(service: Manifest) -> Iterator[str]:
    name, spec = str(service["metadata"]["name"]), service["spec"]
    cluster = spec["rayClusterConfig"]
    if len(name) > _MOST_NAME or not _NAME.fullmatch(name):
        yield f"RayService/{name}: its name must be a DNS label of at most {_MOST_NAME} characters"
    if cluster.get("rayVersion") != version("ray"):
        yield f"RayService/{name}: rayVersion {cluster.get('rayVersion')} is not that of the package, {version('ray')}"
    if cluster.get("gcsFaultToleranceOptions", {}).get("externalStorageNamespace"):
        yield f"RayService/{name}: externalStorageNamespace must not be set: an upgrade would find the old state"
    if spec.get("serveService", {}).get("metadata", {}).get("name") or cluster["headGroupSpec"].get("headService"):
        yield f"RayService/{name}: services must keep the operator's names, or upgrades get stuck"
    autoscales = bool(cluster.get("enableInTreeAutoscaling"))
    if autoscales and cluster.get("autoscalerOptions", {}).get("version") != "v2":
        yield f"RayService/{name}: the autoscaler must be v2: v1 ends busy nodes"
    deletion = spec.get("rayClusterDeletionDelaySeconds", 60)
    for group_name, group in groups(service):
        where = f"RayService/{name}: group {group_name}"
        yield from (f"{where}: {problem}" for problem in _group(group, autoscales, deletion))


def _group(group: Manifest, autoscales: bool, deletion_s: int) -> Iterator[str]:
    parameters, pod = group.get("rayStartParams", {}), group["template"]["spec"]
    least, most = group.get("minReplicas"), group.get("maxReplicas")
    if least is not None and most is not None and not 0 <= least <= group.get("replicas", least) <= most:
        yield f"replicas must be between minReplicas ({least}) and maxReplicas ({most})"
    if "labels" in parameters:
        yield "labels belong into labels, not into rayStartParams"
    if group.get("resources") and any(key in parameters for key in _RESOURCES):
        yield "resources must be either in rayStartParams or in resources"
    if autoscales and pod.get("restartPolicy") != "Never":
        yield "restartPolicy must be Never: the autoscaler replaces pods itself"
    if not pod["containers"][0]["name"].startswith("ray-"):
        yield "Ray's container must be the first one"
    grace = pod.get("terminationGracePeriodSeconds", 30)
    if grace > deletion_s:
        yield f"its pods may take {grace} s to finish, but an old cluster is deleted after {deletion_s} s"
    yield from _container(pod["containers"][0], grace)


def _container(container: Manifest, grace_s: int) -> Iterator[str]:
    env = container.get("env", [])
    names = [one["name"] for one in env]
    variables = {one["name"]: one.get("value") for one in env}
    for name in _OWN_VARIABLES:
        if name in variables:
            yield f"{name} is set by gcsFaultToleranceOptions"
    twice = {name for name in names if names.count(name) > 1}
    if twice:
        yield f"{', '.join(sorted(twice))}: set twice"
    drain = variables.get("RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S")
    if drain is None or int(drain) >= grace_s:
        yield f"RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S must end before the pod is killed after {grace_s} s"
    amounts = container["resources"]
    if amounts.get("requests") != amounts.get("limits"):
        yield "requests must be limits: Ray takes limits for what the node has"
    if "memory" not in amounts.get("limits", {}) or "cpu" not in amounts.get("limits", {}):
        yield "limits of cpu and memory are needed: Ray takes them for what the node has"
    if str(container["image"]).endswith(":latest") or ":" not in str(container["image"]):
        yield f"the image {container['image']} has no version"
