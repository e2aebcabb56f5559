"""What Serve is asked to reserve for a replica, and how threads are shared among ranks."""

import os

import pytest
from ray.serve._private.api import call_user_app_builder_with_args_if_necessary
from ray.serve._private.build_app import build_app as serve_build

from warmroot.actors.placement import rank_resources
from warmroot.cluster.config import WarmrootConfig
from warmroot.cluster.errors import ConfigError
from warmroot.deploy.app import build_app, replica_deployments, replica_resources, replica_threads


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


def test_a_device_that_is_named_needs_no_node_that_has_it():
    assert replica_resources(config(device="cuda", threads_per_replica=2))["ray_actor_options"]["num_gpus"] == 1
    gang = replica_resources(config(device="cuda", tensor_parallel_size=8, threads_per_replica=16))
    assert gang["placement_group_bundles"] == [{"CPU": 16.0, "GPU": 8.0}]
    assert replica_resources(config(device="cpu"))["ray_actor_options"]["num_gpus"] == 0


def test_deployments_are_named_after_their_models_where_there_are_several():
    assert replica_deployments([config()]) == ["Replica"]
    configs = [WarmrootConfig.of("org/model-7B"), WarmrootConfig.of("/weights/x.gguf", served_model_name="small")]
    assert replica_deployments(configs) == ["Replica-org-model-7B", "Replica-small"]
    with pytest.raises(ConfigError, match="Replica-a-b"):
        replica_deployments([WarmrootConfig.of("a/b"), WarmrootConfig.of("a-b")])


def test_a_serve_config_can_name_the_builder():
    application = call_user_app_builder_with_args_if_necessary(build_app, {"models": [{"model": "a"}, {"model": "b"}]})
    names = [deployment.name for deployment in serve_build(application, name="x").deployments]
    assert sorted(names) == ["Ingress", "Replica-a", "Replica-b"]
