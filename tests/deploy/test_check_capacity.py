"""Whether nodes hold the replicas of an application, and pods live as long as requests: mistakes are found."""

from collections.abc import Callable
from typing import Any

import pytest
import yaml

from warmroot.deploy.checks import serve_config
from warmroot.deploy.checks.quantities import number
from warmroot.deploy.checks.tools import Manifest

needs_helm = pytest.mark.tools("helm4")


@pytest.mark.parametrize(
    ("quantity", "value"),
    [("2", 2), (1.5, 1.5), ("500m", 0.5), ("2k", 2000), ("2Gi", 2**31), ("1Ti", 2**40), ("3M", 3e6)],
)
def test_quantities(quantity, value):
    assert number(quantity) == value


@pytest.mark.parametrize("quantity", ["", "Gi", "2 Gi", "many"])
def test_what_is_no_quantity_is_refused(quantity):
    with pytest.raises(ValueError, match="is no quantity"):
        number(quantity)


def of_config(change: Callable[[Any], None]) -> Callable[[Any], None]:
    def spoil(service: Any) -> None:
        config = yaml.safe_load(service["spec"]["serveConfigV2"])
        change(config["applications"][0])
        service["spec"]["serveConfigV2"] = yaml.safe_dump(config)

    return spoil


def of_args(**keys: Any) -> Callable[[Any], None]:
    return of_config(lambda application: application["args"].update(keys))


def of_workers(**keys: Any) -> Callable[[Any], None]:
    return lambda service: service["spec"]["rayClusterConfig"]["workerGroupSpecs"][1].update(keys)


def scaled_to(most: int) -> Callable[[Any], None]:
    own = {"name": "Replica", "autoscaling_config": {"min_replicas": 1, "max_replicas": most}}
    return of_config(lambda application: application["deployments"].__setitem__(1, own))


@needs_helm
@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (of_workers(maxReplicas=0), "llama-405b: 0 of 1 replicas find a place"),
        (of_config(lambda one: one["deployments"][1].update(num_replicas=3)), "2 of 3 replicas find a place"),
        (scaled_to(4), "2 of 4 replicas find a place"),
        (of_args(request_timeout=900), "a request may take 900 s (request_timeout), and a pod that is to go 570 s"),
        (of_args(shutdown_grace=700), "shutdown_grace is 700 s, but the nodes of ingress end after 600 s"),
        (
            of_config(lambda one: one["deployments"][0]["ray_actor_options"].pop("label_selector")),
            "Ingress: would hold nodes with GPUs, of the group h200",
        ),
        (
            of_config(lambda one: one["deployments"][0]["ray_actor_options"].update(label_selector={"a": "b"})),
            "Ingress: no group has nodes with the labels {'a': 'b'}",
        ),
    ],
)
def test_what_finds_no_place_and_what_is_cut_off_are_found(
    manifests: list[Manifest], service: Manifest, spoil: Callable[[Any], None], message: str
):
    assert serve_config.problems(manifests) == []
    spoil(service)
    assert message in " ".join(serve_config.problems(manifests))


@needs_helm
def test_stages_take_different_nodes_of_their_group(manifests: list[Manifest], service: Manifest):
    workers = service["spec"]["rayClusterConfig"]["workerGroupSpecs"][1]
    workers.update(maxReplicas=1)
    assert serve_config.problems(manifests) == []
    workers.update(numOfHosts=1)
    found = " ".join(serve_config.problems(manifests))
    assert "2 stages need a group whose hosts are a multiple of 2" in found
