"""The bundles of a gang, and what is said while they find no place."""

from warmroot.actors.placement import stage_bundles, what_is_missing
from warmroot.cluster.topology import Topology


def test_a_bundle_holds_a_stage():
    assert stage_bundles(Topology(tp=2, pp=3), {"CPU": 2.0, "GPU": 0}) == [{"CPU": 4.0}] * 3
    assert stage_bundles(Topology(tp=2, ep=4), {"GPU": 1}) == [{"GPU": 4}]


def test_no_node():
    assert what_is_missing([{"CPU": 1}], {}, {}) == "the gang cannot be placed: the cluster has no node"
    assert "no node with rack=7 and zone=b" in what_is_missing([{"CPU": 1}], {}, {"rack": "7", "zone": "b"})


def test_no_node_is_large_enough():
    nodes = {"10.0.0.2": {"CPU": 8}, "10.0.0.1": {"CPU": 2, "GPU": 2}}
    message = what_is_missing([{"CPU": 2}, {"CPU": 4, "GPU": 2}], nodes, {})
    assert message == (
        "the gang cannot be placed: stage 1 needs a node with 4 CPU and 2 GPU, and there is none"
        " (10.0.0.1 has 2 CPU and 2 GPU; 10.0.0.2 has 8 CPU and 0 GPU)"
    )


def test_nodes_are_taken():
    message = what_is_missing([{"CPU": 2}, {"CPU": 2}], {"10.0.0.1": {"CPU": 2}}, {})
    assert message.startswith("the gang waits for 2 CPU for stage 0, 2 CPU for stage 1:")
