"""What Serve is asked to reserve for a replica, and how threads are shared among ranks."""

import os

import pytest

from warmroot.actors.placement import rank_resources
from warmroot.cluster.config import WarmrootConfig
from warmroot.cluster.errors import ConfigError
from warmroot.deploy.app import replica_resources, replica_threads


def config(**keys) -> WarmrootConfig:
    return WarmrootConfig.of("smollm2", **keys)


def test_a_replica_of_one_process_takes_its_threads():
    options = replica_resources(config(threads_per_replica=3))
    assert options == {"ray_actor_options": {"num_cpus": 3, "num_gpus": 0}}


def test_a_gang_has_a_bundle_for_each_stage():
    keys = {"tensor_parallel_size": 2, "pipeline_parallel_size": 3, "threads_per_replica": 12}
    options = replica_resources(config(**keys))
    assert options["ray_actor_options"] == {"num_cpus": 0}
    assert options["placement_group_bundles"] == [{"CPU": 4.0}] * 3
    assert options["placement_group_strategy"] == "SPREAD"
    assert rank_resources(options["placement_group_bundles"][0], config(**keys).parallel.topology()) == {"CPU": 2.0}


def test_a_single_stage_stays_on_one_node():
    options = replica_resources(config(tensor_parallel_size=4, threads_per_replica=4))
    assert options["placement_group_bundles"] == [{"CPU": 4.0}]
    assert options["placement_group_strategy"] == "STRICT_PACK"


def test_expert_groups_share_their_stage():
    keys = {"enable_expert_parallel": True, "expert_parallel_size": 4, "threads_per_replica": 8}
    assert replica_resources(config(**keys))["placement_group_bundles"] == [{"CPU": 8.0}]


def test_labels_and_accelerators_choose_nodes():
    keys = {"node_labels": ["pool=blue", "zone=a"], "accelerator_type": "H100", "threads_per_replica": 2}
    labels = {"pool": "blue", "zone": "a", "ray.io/accelerator-type": "H100"}
    assert replica_resources(config(**keys))["ray_actor_options"]["label_selector"] == labels
    gang = replica_resources(config(tensor_parallel_size=2, pipeline_parallel_size=2, **keys))
    assert gang["placement_group_bundle_label_selector"] == [labels, labels]


def test_every_rank_has_a_thread():
    cores = os.cpu_count() or 1
    assert replica_threads(config()) == cores
    assert replica_threads(config(tensor_parallel_size=cores, pipeline_parallel_size=2)) == 2 * cores
    assert replica_threads(config(num_replicas=2 * cores)) == 1


@pytest.mark.parametrize(
    ("keys", "param", "message"),
    [
        ({"expert_parallel_size": 2}, "expert_parallel_size", "needs enable_expert_parallel"),
        ({"num_redundant_experts": 2}, "num_redundant_experts", "needs enable_expert_parallel"),
        (
            {"tensor_parallel_size": 2, "enable_expert_parallel": True, "expert_parallel_size": 3},
            "expert_parallel_size",
            "3 neither divides tensor_parallel_size (2) nor is a multiple of it; 1, 2, 4, 6, ... fit",
        ),
        ({"tensor_parallel_size": 0}, "tensor_parallel_size", "greater than or equal to 1"),
        ({"node_labels": "blue"}, "node_labels", "name=value"),
    ],
)
def test_impossible_layouts_name_their_key(keys, param, message):
    with pytest.raises(ConfigError, match=param) as caught:
        config(**keys)
    assert caught.value.param == param
    assert message in caught.value.message
