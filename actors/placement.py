"""Where a gang's ranks may run: a placement group with a bundle per pipeline stage.

A bundle never spans nodes, so the ranks of a stage share one; stages go to different nodes where there are several.
"""

from collections.abc import Mapping, Sequence

import ray
from ray.util.placement_group import placement_group_table

from ..cluster.topology import Topology

Resources = Mapping[str, float]


def stage_bundles(topology: Topology, rank_resources: Resources) -> list[dict[str, float]]:
    """What each stage takes of one node, for ranks that take ``rank_resources`` each."""
    bundle = {name: amount * topology.stage_size for name, amount in rank_resources.items() if amount}
    return [dict(bundle) for _ in range(topology.pp)]


def rank_resources(bundle: Resources, topology: Topology) -> Resources:
    """What each rank takes of a stage's bundle."""
    return {name: amount / topology.stage_size for name, amount in bundle.items()}


def strategy(topology: Topology) -> str:
    """How bundles are spread: each on a node, different ones where there are several."""
    return "SPREAD" if topology.pp > 1 else "STRICT_PACK"


def has_waiting_group() -> bool:
    """Whether some placement group of the cluster has not found its nodes yet."""
    return any(group["state"] in ("PENDING", "RESCHEDULING") for group in placement_group_table().values())


def node_resources(labels: Mapping[str, str]) -> dict[str, Resources]:
    """What the nodes that live and have the labels were given, by their addresses."""
    return {
        node["NodeManagerAddress"]: node["Resources"]
        for node in ray.nodes()
        if node["Alive"] and labels.items() <= node.get("Labels", {}).items()
    }


def could_fit(bundles: Sequence[Resources], nodes: Mapping[str, Resources]) -> bool:
    """Whether each bundle, taken alone, has a node that is large enough."""
    return all(_has_node(bundle, nodes) for bundle in bundles)


def what_is_missing(bundles: Sequence[Resources], nodes: Mapping[str, Resources], labels: Mapping[str, str]) -> str:
    """Why bundles find no place, and what would help. ``nodes`` are those that have the labels."""
    having = f" with {' and '.join(f'{name}={value}' for name, value in labels.items())}" if labels else ""
    if not nodes:
        return f"the gang cannot be placed: the cluster has no node{having}"
    for stage, bundle in enumerate(bundles):
        if not _has_node(bundle, nodes):
            there = "; ".join(f"{address} has {_amounts(bundle, node)}" for address, node in sorted(nodes.items()))
            return (
                f"the gang cannot be placed: stage {stage} needs a node{having} with {_amounts(bundle, bundle)},"
                f" and there is none ({there})"
            )
    parts = ", ".join(f"{_amounts(bundle, bundle)} for stage {stage}" for stage, bundle in enumerate(bundles))
    return (
        f"the gang waits for {parts}: the nodes{having} are large enough one by one,"
        " but something else runs there, or the stages compete"
    )


def _has_node(bundle: Resources, nodes: Mapping[str, Resources]) -> bool:
    return any(all(node.get(name, 0.0) >= amount for name, amount in bundle.items()) for node in nodes.values())


def _amounts(names: Resources, given: Resources) -> str:
    return " and ".join(f"{given.get(name, 0.0):g} {name}" for name in names)
