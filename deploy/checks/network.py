"""Network policies, as a cluster would apply them: who must reach whom, and who must not."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .pods import all_pods, ray_pods
from .selectors import labels_of, selects
from .tools import Manifest

Rule = Mapping[str, Any]
GANG = 45678
"""One of the many ports that only Ray's own pods use."""
REDIS, DNS = 6379, 53
OF_OPERATOR = (8265, 52365)
OF_PROMETHEUS = (8080, 8000)
"""Those of every pod."""
OF_HEAD_ALONE = (6379, 8265, 10001)
"""Whoever reaches one of these can run code on the cluster."""


@dataclass(frozen=True, slots=True)
class Peer:
    """A pod by its labels, of the release's namespace or of another one."""

    labels: Mapping[str, str]
    here: bool = True


OPERATOR = Peer({"app.kubernetes.io/name": "kuberay-operator"}, here=False)
PROMETHEUS = Peer({"app.kubernetes.io/name": "prometheus"}, here=False)
STRANGERS = (Peer({}, here=False), Peer({}))
NAMESERVER = Peer({"k8s-app": "kube-dns"}, here=False)


def problems(manifests: Sequence[Manifest]) -> list[str]:
    """Of all policies of a release together; it may have none."""
    policies = [manifest for manifest in manifests if manifest.get("kind") == "NetworkPolicy"]
    if not policies:
        return []
    ray = {name: Peer(labels_of(pod)) for name, pod in ray_pods(manifests).items()}
    redis = {
        name: Peer(labels_of(pod))
        for name, pod in all_pods(manifests).items()
        if "redis" in str(labels_of(pod).get("app.kubernetes.io/component"))
    }
    return [*_among_themselves(policies, ray, redis), *_others(policies, ray, redis)]


def _among_themselves(
    policies: Sequence[Manifest], ray: Mapping[str, Peer], redis: Mapping[str, Peer]
) -> Iterator[str]:
    wanted = [(GANG, ray), (REDIS, redis)]
    for name, pod in ray.items():
        for port, others in wanted:
            for other_name, other in others.items():
                if not (allows(policies, "Ingress", other, pod, port) and allows(policies, "Egress", pod, other, port)):
                    yield f"{name} does not reach {other_name} at port {port}"
        if not allows(policies, "Egress", pod, NAMESERVER, DNS, "UDP"):
            yield f"{name} does not reach a name server"


def _others(policies: Sequence[Manifest], ray: Mapping[str, Peer], redis: Mapping[str, Peer]) -> Iterator[str]:
    for name, pod in ray.items():
        for who, peer, ports in (("operator", OPERATOR, OF_OPERATOR), ("Prometheus", PROMETHEUS, OF_PROMETHEUS)):
            missing = [port for port in ports if not allows(policies, "Ingress", pod, peer, port)]
            yield from (f"{who} does not reach {name} at port {port}" for port in missing)
        yield from (f"{name}: anyone reaches port {port}" for port in OF_HEAD_ALONE if _open(policies, pod, port))
    yield from (f"{name}: anyone reaches port {REDIS}" for name, pod in redis.items() if _open(policies, pod, REDIS))


def _open(policies: Sequence[Manifest], pod: Peer, port: int) -> bool:
    return any(allows(policies, "Ingress", pod, stranger, port) for stranger in STRANGERS)


def allows(
    policies: Sequence[Manifest], direction: str, pod: Peer, peer: Peer, port: int, protocol: str = "TCP"
) -> bool:
    """Whether policies let ``pod`` be reached by ``peer``, or reach it (``direction``), at a port.

    What no policy of that direction selects is open.
    """
    of_pod = [
        policy["spec"]
        for policy in policies
        if direction in policy["spec"]["policyTypes"] and selects(policy["spec"]["podSelector"], pod.labels)
    ]
    side = {"Ingress": ("ingress", "from"), "Egress": ("egress", "to")}[direction]
    rules = [rule for spec in of_pod for rule in spec.get(side[0]) or []]
    return not of_pod or any(_passes(rule, rule.get(side[1]), peer, port, protocol) for rule in rules)


def _passes(rule: Rule, peers: Sequence[Rule] | None, peer: Peer, port: int, protocol: str) -> bool:
    ports = rule.get("ports")
    fits = not ports or any(_has(one, port, protocol) for one in ports)
    return fits and (not peers or any(_is(one, peer) for one in peers))


def _has(ports: Rule, port: int, protocol: str) -> bool:
    first = ports.get("port", port)
    return ports.get("protocol", "TCP") == protocol and first <= port <= ports.get("endPort", first)


def _is(rule: Rule, peer: Peer) -> bool:
    """A rule that names a namespace is taken to mean that of a peer from elsewhere."""
    if "ipBlock" in rule or ("namespaceSelector" in rule) == peer.here:
        return False
    return selects(rule.get("podSelector", {}), peer.labels)
