"""Names by which the objects of a release mean each other: what a cluster accepts though it leads nowhere."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

import yaml

from .pods import all_pods, containers, groups, ray_pods, services
from .selectors import labels_of, selected, selects
from .tools import Manifest, name_of

Pods = Mapping[str, Manifest]
FILES = ("api_keys_file", "channel_certfile", "channel_keyfile", "channel_ca_certs")
"""Keys of the configuration that name files of the pods."""


def problems(manifests: Sequence[Manifest]) -> list[str]:
    """Of selectors, ports, mounts, and names of Services."""
    pods = all_pods(manifests)
    return [
        *_same_names(manifests),
        *(problem for name, pod in pods.items() for problem in _mounts(name, pod)),
        *_services(manifests, pods),
        *_budgets(manifests, pods),
        *_monitors(manifests, pods),
        *_backends(manifests),
        *_stores(manifests),
        *_files(manifests),
    ]


def _same_names(manifests: Sequence[Manifest]) -> Iterator[str]:
    names = Counter(name_of(manifest) for manifest in manifests)
    yield from (f"{name}: stands twice" for name, count in names.items() if count > 1)


def _mounts(name: str, pod: Manifest) -> Iterator[str]:
    if name.startswith("StatefulSet/"):
        return  # Its claims are volumes too.
    volumes = {volume["name"] for volume in pod["spec"].get("volumes", [])}
    for container in containers(pod):
        missing = {mount["name"] for mount in container.get("volumeMounts", [])} - volumes
        yield from (f"{name}: {container['name']} mounts {one}, and there is no such volume" for one in missing)


def _services(manifests: Sequence[Manifest], pods: Pods) -> Iterator[str]:
    for service in _of_kind(manifests, "Service"):
        targets = selected({"matchLabels": service["spec"].get("selector", {})}, pods)
        if not targets:
            yield f"{name_of(service)}: its selector takes no pod"
        for port in service["spec"]["ports"]:
            target = port.get("targetPort", port["port"])
            if targets and not _has_port(targets, target):
                yield f"{name_of(service)}: no pod of it has the port {target}"


def _budgets(manifests: Sequence[Manifest], pods: Pods) -> Iterator[str]:
    """Each of Ray's pods has one: Kubernetes evicts no pod that has two."""
    budgets = _of_kind(manifests, "PodDisruptionBudget")
    for budget in budgets:
        if not selected(budget["spec"]["selector"], pods):
            yield f"{name_of(budget)}: its selector takes no pod"
    for name, pod in ray_pods(manifests).items():
        of_pod = [one for one in budgets if selects(one["spec"]["selector"], labels_of(pod))]
        if budgets and len(of_pod) != 1:
            yield f"{name}: must have one PodDisruptionBudget, and has {len(of_pod)}"
        for budget in of_pod:
            # A RayCluster has no scale subresource: of its pods Kubernetes knows only how many there are.
            if not isinstance(budget["spec"].get("minAvailable"), int):
                yield f"{name_of(budget)}: {name} could never be evicted: minAvailable must be a number"


def _monitors(manifests: Sequence[Manifest], pods: Pods) -> Iterator[str]:
    for monitor in _of_kind(manifests, "PodMonitor"):
        targets = selected(monitor["spec"]["selector"], pods)
        for endpoint in monitor["spec"]["podMetricsEndpoints"]:
            if not _has_port(targets, endpoint["port"]):
                yield f"{name_of(monitor)}: no pod that it selects has the port {endpoint['port']}"


def _backends(manifests: Sequence[Manifest]) -> Iterator[str]:
    """What stands before the API must lead to the operator's Service of the proxies."""
    known = {(f"{service['metadata']['name']}-serve-svc", 8000) for service in services(manifests)}
    for route in _of_kind(manifests, "HTTPRoute"):
        for backend in (one for rule in route["spec"]["rules"] for one in rule.get("backendRefs", [])):
            if (backend["name"], backend.get("port")) not in known:
                yield f"{name_of(route)}: {backend['name']}:{backend.get('port')} is not the Service of the proxies"
    for ingress in _of_kind(manifests, "Ingress"):
        rules = ingress["spec"].get("rules") or []
        if not rules:
            yield f"{name_of(ingress)}: has no host"
        for backend in (path["backend"]["service"] for rule in rules for path in rule["http"]["paths"]):
            if (backend["name"], backend["port"].get("number")) not in known:
                yield f"{name_of(ingress)}: {backend['name']} is not the Service of the proxies"


def _stores(manifests: Sequence[Manifest]) -> Iterator[str]:
    """Both Redis: a bare host is a Service of this release, its pods keep their data, and the two are not one."""
    for service in services(manifests):
        options = service["spec"]["rayClusterConfig"].get("gcsFaultToleranceOptions", {})
        applications: Any = yaml.safe_load(service["spec"]["serveConfigV2"])["applications"]
        stores = [str(one.get("args", {}).get("metadata_store", "")) for one in applications]
        heads = [f"redis://{options['redisAddress']}"] if "redisAddress" in options else []
        for url in [*heads, *stores]:
            yield from (f"{name_of(service)}: {problem}" for problem in _store(urlsplit(url).hostname, manifests))
        if {_place(url) for url in heads} & {_place(url) for url in stores}:
            yield f"{name_of(service)}: the head and the routers must not share a Redis: its state is not for eviction"


def _files(manifests: Sequence[Manifest]) -> Iterator[str]:
    """Files that the application is to read must lie in a volume of every pod."""
    for service in services(manifests):
        applications: Any = yaml.safe_load(service["spec"]["serveConfigV2"])["applications"]
        files = {key: one["args"][key] for one in applications for key in FILES if key in one.get("args", {})}
        for name, group in groups(service):
            mounts = [
                mount["mountPath"]
                for container in containers(group["template"])
                for mount in container.get("volumeMounts", [])
            ]
            for key, file in files.items():
                if not any(file.startswith(f"{mount}/") for mount in mounts):
                    yield f"{name_of(service)}: {key}: {file} is in no volume of {name}"


def _store(host: str | None, manifests: Sequence[Manifest]) -> Iterator[str]:
    if host is None or "." in host:
        return
    service = next((one for one in _of_kind(manifests, "Service") if one["metadata"]["name"] == host), None)
    if service is None:
        yield f"no Service of the release is named {host}"
        return
    keeping = [
        workload
        for workload in _of_kind(manifests, "StatefulSet")
        if selects({"matchLabels": service["spec"]["selector"]}, labels_of(workload["spec"]["template"]))
        and "--appendonly yes" in str(workload["spec"]["template"])
        and _claims(workload)
    ]
    if not keeping:
        yield f"{host} forgets: it needs a claim, and --appendonly yes"


def _claims(workload: Manifest) -> bool:
    """Whether a claim of the workload's own is mounted."""
    claims = {claim["metadata"]["name"] for claim in workload["spec"].get("volumeClaimTemplates", [])}
    return any(
        mount["name"] in claims
        for container in containers(workload["spec"]["template"])
        for mount in container.get("volumeMounts", [])
    )


def _place(url: str) -> tuple[str | None, int | None, str]:
    parts = urlsplit(url)
    return parts.hostname, parts.port, parts.path.strip("/")


def _has_port(pods: Pods, port: int | str) -> bool:
    declared = [one for pod in pods.values() for container in containers(pod) for one in container.get("ports", [])]
    return any(port in (one.get("name"), one["containerPort"]) for one in declared)


def _of_kind(manifests: Sequence[Manifest], kind: str) -> list[Manifest]:
    return [manifest for manifest in manifests if manifest.get("kind") == kind]
