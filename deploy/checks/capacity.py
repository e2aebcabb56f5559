"""Whether the nodes that a RayService may have hold the replicas that its application asks for."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from ...actors.placement import could_fit, strategy
from ...cluster.config import WarmrootConfig
from ..app import gang_bundles
from .pods import groups
from .quantities import number
from .tools import Manifest

Resources = Mapping[str, float]


@dataclass(slots=True)
class Node:
    """What is left of one, and the labels of its group."""

    left: dict[str, float]
    labels: Mapping[str, str]

    def take(self, bundle: Resources) -> bool:
        """Whether the bundle found room."""
        if any(self.left.get(name, 0.0) < amount for name, amount in bundle.items()):
            return False
        for name, amount in bundle.items():
            self.left[name] -= amount
        return True


def problems(configs: Sequence[WarmrootConfig], replicas: Sequence[int], service: Manifest) -> Iterator[str]:
    """Of models with so many replicas each, at most, where all groups have as many nodes as they may have."""
    room = [node for _, group in groups(service)[1:] for node in _nodes(group)]
    for config, most in zip(configs, replicas, strict=True):
        name = config.model.names[0]
        if config.deploy.threads_per_replica is None:
            yield f"{name}: threads_per_replica is needed: whoever starts the replicas cannot see the nodes' cores"
            continue
        single = list(_of_one(config, service))
        yield from (f"{name}: {problem}" for problem in single)
        if not single:
            placed = sum(_place(config, room) for _ in range(most))
            if placed < most:
                yield f"{name}: {placed} of {most} replicas find a place on the most nodes that there may be"


def _of_one(config: WarmrootConfig, service: Manifest) -> Iterator[str]:
    """Whether some group has nodes for each stage, and as many of them as there are stages."""
    selector, topology, bundles = config.deploy.label_selector, config.parallel.topology(), gang_bundles(config)
    fitting = {
        name: _resources(group)
        for name, group in groups(service)[1:]
        if selector.items() <= group.get("labels", {}).items()
    }
    if not could_fit(bundles, fitting):
        yield f"a replica needs {bundles[0]} on a node with labels {selector}; there are {fitting or 'none'}"
    if topology.pp > 1 and not any(group.get("numOfHosts", 1) % topology.pp == 0 for _, group in groups(service)[1:]):
        yield f"{topology.pp} stages need a group whose hosts are a multiple of {topology.pp}"


def _place(config: WarmrootConfig, room: Sequence[Node]) -> bool:
    """Whether a replica found room for all its bundles, of which stages take different nodes."""
    selector = config.deploy.label_selector
    nodes = [node for node in room if selector.items() <= node.labels.items()]
    spread = strategy(config.parallel.topology()) == "SPREAD"
    for bundle in gang_bundles(config):
        node = next((node for node in nodes if node.take(bundle)), None)
        if node is None:
            return False
        if spread:
            nodes.remove(node)
    return True


def _nodes(group: Manifest) -> list[Node]:
    count = group.get("maxReplicas", 0) * group.get("numOfHosts", 1)
    return [Node(dict(_resources(group)), group.get("labels", {})) for _ in range(count)]


def _resources(group: Manifest) -> Resources:
    """Of one of its nodes, as Ray counts them: a fraction of a CPU is rounded up."""
    limits = group["template"]["spec"]["containers"][0]["resources"]["limits"]
    gpus = sum(float(amount) for name, amount in limits.items() if "gpu" in name)
    return {"CPU": float(math.ceil(number(limits["cpu"]))), "GPU": gpus}
