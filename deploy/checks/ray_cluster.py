"""What KubeRay's operator refuses or silently does otherwise, though the definition of a RayService allows it."""

import re
from collections.abc import Iterator, Sequence
from importlib.metadata import version

from .pods import DRAIN_VARIABLE, groups, services, variables
from .quantities import number
from .tools import Manifest

_NAME = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_MOST_NAME = 47
_OWN_VARIABLES = ("RAY_REDIS_ADDRESS", "REDIS_PASSWORD", "RAY_external_storage_namespace")
_OWN_LABELS = ("app.kubernetes.io/name", "app.kubernetes.io/created-by", "ray.io/identifier")
"""By which the operator's Services find the head."""
_RESOURCES = ("num-cpus", "num-gpus", "memory", "resources")
_PROBES = ("readinessProbe", "livenessProbe")
_HEAD_MEMORY = 8 * 2**30
_HEAD_PORTS = {"metrics", "as-metrics", "dash-metrics"}
_OF_INCREMENTS = ("gatewayClassName", "stepSizePercent", "intervalSeconds")


def problems(manifests: Sequence[Manifest]) -> list[str]:
    """Of every RayService among ``manifests``; it is an error if there is none."""
    found = [
        f"RayService/{service['metadata']['name']}: {problem}"
        for service in services(manifests)
        for problem in _problems(service)
    ]
    return found if services(manifests) else ["there is no RayService"]


def _problems(service: Manifest) -> Iterator[str]:
    name, spec = str(service["metadata"]["name"]), service["spec"]
    cluster = spec["rayClusterConfig"]
    if len(name) > _MOST_NAME or not _NAME.fullmatch(name):
        yield f"its name must be a DNS label of at most {_MOST_NAME} characters"
    if cluster.get("rayVersion") != version("ray"):
        yield f"rayVersion {cluster.get('rayVersion')} is not that of the package, {version('ray')}"
    if spec.get("serveService", {}).get("metadata", {}).get("name") or cluster["headGroupSpec"].get("headService"):
        yield "services must keep the operator's names, or upgrades get stuck"
    autoscales = bool(cluster.get("enableInTreeAutoscaling"))
    if autoscales and cluster.get("autoscalerOptions", {}).get("version") != "v2":
        yield "the autoscaler must be v2: v1 ends busy nodes"
    if cluster.get("authOptions", {}).get("enableK8sTokenAuth"):
        yield "enableK8sTokenAuth does not work for a RayService"
    yield from _fault_tolerance(cluster.get("gcsFaultToleranceOptions", {}))
    yield from _upgrade(spec.get("upgradeStrategy", {}), autoscales)
    yield from _head(cluster["headGroupSpec"])
    names = [group_name for group_name, _ in groups(service)]
    yield from (f"two groups are named {one}" for one in {one for one in names if names.count(one) > 1})
    deletion = spec.get("rayClusterDeletionDelaySeconds", 60)
    for group_name, group in groups(service):
        given = [*_group(group, autoscales, deletion), *([] if group_name == "head" else _counts(group))]
        yield from (f"group {group_name}: {problem}" for problem in given)


def _fault_tolerance(options: Manifest) -> Iterator[str]:
    if options.get("externalStorageNamespace"):
        yield "externalStorageNamespace must not be set: an upgrade would find the old state"
    if options.get("backend") == "rocksdb" and "redisAddress" in options:
        yield "the head's state is either in a Redis or in rocksdb"


def _upgrade(strategy: Manifest, autoscales: bool) -> Iterator[str]:
    """In steps traffic moves from cluster to cluster by a Gateway, and nodes by the autoscaler."""
    if strategy.get("type") != "NewClusterWithIncrementalUpgrade":
        return
    options = strategy.get("clusterUpgradeOptions", {})
    yield from (f"an upgrade in steps needs {key}" for key in _OF_INCREMENTS if not options.get(key))
    if not autoscales:
        yield "an upgrade in steps needs the autoscaler"
    if options.get("stepSizePercent", 0) > options.get("maxSurgePercent", 100):
        yield "an upgrade's stepSizePercent must not be above its maxSurgePercent"


def _head(head: Manifest) -> Iterator[str]:
    container = head["template"]["spec"]["containers"][0]
    if head.get("rayStartParams", {}).get("num-cpus") != "0":
        yield "the head must have num-cpus 0: what serves there dies with it"
    if number(container["resources"].get("limits", {}).get("memory", _HEAD_MEMORY)) < _HEAD_MEMORY:
        yield "the head needs 8Gi of memory: less is used up within hours"
    missing = _HEAD_PORTS - {port.get("name") for port in container.get("ports", [])}
    if missing:
        yield f"the head does not declare {', '.join(sorted(missing))}, which Prometheus reads"


def _counts(group: Manifest) -> Iterator[str]:
    least, most = group.get("minReplicas"), group.get("maxReplicas")
    if least is None or most is None:
        yield "minReplicas and maxReplicas are needed"
    elif not 0 <= least <= group.get("replicas", least) <= most:
        yield f"replicas must be between minReplicas ({least}) and maxReplicas ({most})"


def _group(group: Manifest, autoscales: bool, deletion_s: int) -> Iterator[str]:
    parameters, pod = group.get("rayStartParams", {}), group["template"]["spec"]
    labels = {**group["template"].get("metadata", {}).get("labels", {}), **group.get("labels", {})}
    yield from (
        f"the label {label} is the operator's: its Service would not find the head"
        for label in _OWN_LABELS
        if label in labels
    )
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
    yield from _shared_memory(pod)


def _shared_memory(pod: Manifest) -> Iterator[str]:
    """The operator mounts /dev/shm itself, as large as the container's memory; another one must be bounded."""
    container = pod["containers"][0]
    names = [mount["name"] for mount in container.get("volumeMounts", []) if mount["mountPath"] == "/dev/shm"]
    for volume in (volume for volume in pod.get("volumes", []) if volume["name"] in names):
        size = volume.get("emptyDir", {}).get("sizeLimit")
        if size is None or number(size) >= number(container["resources"].get("limits", {}).get("memory", 0)):
            yield "/dev/shm needs a sizeLimit below the container's memory, of which it is a part"


def _container(container: Manifest, grace_s: int) -> Iterator[str]:
    names, values = [one["name"] for one in container.get("env", [])], variables(container)
    yield from (f"{name} is set by gcsFaultToleranceOptions" for name in _OWN_VARIABLES if name in names)
    twice = {name for name in names if names.count(name) > 1}
    if twice:
        yield f"{', '.join(sorted(twice))}: set twice"
    yield from (f"{probe} replaces what the operator asks of Ray" for probe in _PROBES if probe in container)
    if "preStop" in container.get("lifecycle", {}):
        yield "preStop delays the signal that begins to drain the node, or ends its streams"
    drain = values.get(DRAIN_VARIABLE)
    if drain is None or int(drain) >= grace_s:
        yield f"{DRAIN_VARIABLE} must end before the pod is killed after {grace_s} s"
    amounts = container["resources"]
    if amounts.get("requests") != amounts.get("limits"):
        yield "requests must be limits: Ray takes limits for what the node has"
    if "memory" not in amounts.get("limits", {}) or "cpu" not in amounts.get("limits", {}):
        yield "limits of cpu and memory are needed: Ray takes them for what the node has"
    if str(container["image"]).endswith(":latest") or ":" not in str(container["image"]):
        yield f"the image {container['image']} has no version"
