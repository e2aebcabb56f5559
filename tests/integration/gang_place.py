"""A placement group for a gang without Serve."""

import time
from collections.abc import Callable

from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group

from warmroot.actors.placement import Resources, node_resources, stage_bundles, strategy, what_is_missing
from warmroot.cluster.errors import ReplicaUnavailableError
from warmroot.cluster.topology import Topology

ASK_S = 2.0


def place(
    topology: Topology, rank: Resources, *, deadline_s: float, report: Callable[[str], None] = lambda message: None
) -> PlacementGroup:
    """Reserve what Serve would for a replica. ``report`` is told what is missing while they find no place.

    The caller removes the group. Raises ReplicaUnavailableError, with the same words, at the deadline.
    """
    bundles = stage_bundles(topology, rank)
    group = placement_group(bundles, strategy=strategy(topology))
    end = time.monotonic() + deadline_s
    message = ""
    while not group.wait(max(0.0, min(ASK_S, end - time.monotonic()))):
        found = what_is_missing(bundles, node_resources({}), {})
        if found != message:
            message = found
            report(message)
        if time.monotonic() >= end:
            remove_placement_group(group)
            raise ReplicaUnavailableError(message)
    return group
