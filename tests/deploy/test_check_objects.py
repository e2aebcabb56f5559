"""Objects of a release that mean each other, network policies and security: mistakes in each are found."""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from warmroot.deploy.checks import network, prometheus, references, security
from warmroot.deploy.checks.selectors import selects
from warmroot.deploy.checks.tools import EXAMPLES, Manifest, Tools, name_of, render

needs_helm = pytest.mark.tools("helm4")
Spoil = Callable[[Any], None]


@pytest.fixture(scope="session")
def production_rendered() -> list[Manifest]:
    return render(Tools(), "helm4", EXAMPLES / "production.yaml")


def named(manifests: Sequence[Manifest], name: str) -> Manifest:
    return next(manifest for manifest in manifests if name_of(manifest) == name)


@needs_helm
@pytest.mark.parametrize(
    ("name", "spoil", "message"),
    [
        (
            "Service/warmroot-gcs",
            lambda one: one["spec"]["selector"].update(x="y"),
            "Service/warmroot-gcs: its selector takes no pod",
        ),
        (
            "Service/warmroot-gcs",
            lambda one: one["spec"]["ports"][0].update(targetPort="redi"),
            "no pod of it has the port redi",
        ),
        (
            "PodDisruptionBudget/warmroot-worker",
            lambda one: one["spec"]["selector"]["matchLabels"].update({"app.kubernetes.io/component": "workers"}),
            "PodDisruptionBudget/warmroot-worker: its selector takes no pod",
        ),
        (
            "PodDisruptionBudget/warmroot-worker",
            lambda one: one["spec"]["selector"]["matchLabels"].pop("app.kubernetes.io/component"),
            "Pod/warmroot-head: must have one PodDisruptionBudget, and has 2",
        ),
        *(
            (
                "PodDisruptionBudget/warmroot-worker",
                lambda one, wrong=wrong: one.update(spec={"selector": one["spec"]["selector"]} | wrong),
                "Pod/warmroot-h200 could never be evicted",
            )
            for wrong in ({"maxUnavailable": 1}, {"minAvailable": "50%"})
        ),
        (
            "PodMonitor/warmroot",
            lambda one: one["spec"]["podMetricsEndpoints"][0].update(port="metric"),
            "no pod that it selects has the port metric",
        ),
        (
            "HTTPRoute/warmroot",
            lambda one: one["spec"]["rules"][0]["backendRefs"][0].update(name="warmroot-serve"),
            "warmroot-serve:8000 is not the Service of the proxies",
        ),
        (
            "RayService/warmroot",
            lambda one: one["spec"]["rayClusterConfig"]["gcsFaultToleranceOptions"].update(
                redisAddress="warmroot:6379"
            ),
            "no Service of the release is named warmroot",
        ),
        (
            "RayService/warmroot",
            lambda one: one["spec"]["rayClusterConfig"]["gcsFaultToleranceOptions"].update(
                redisAddress="warmroot-metadata:6379"
            ),
            "must not share a Redis",
        ),
        (
            "StatefulSet/warmroot-gcs",
            lambda one: one["spec"].pop("volumeClaimTemplates"),
            "warmroot-gcs forgets",
        ),
        (
            "RayService/warmroot",
            lambda one: one["spec"]["rayClusterConfig"]["headGroupSpec"]["template"]["spec"]["volumes"].pop(0),
            "ray-head mounts tmp, and there is no such volume",
        ),
        (
            "RayService/warmroot",
            lambda one: one["spec"]["rayClusterConfig"]["workerGroupSpecs"][0]["template"]["spec"]["containers"][0][
                "volumeMounts"
            ].pop(-1),
            "api_keys_file: /etc/warmroot/keys/keys.yaml is in no volume of ingress",
        ),
    ],
)
def test_a_name_that_leads_nowhere_is_found(manifests: list[Manifest], name: str, spoil: Spoil, message: str):
    assert references.problems(manifests) == []
    spoil(named(manifests, name))
    assert message in " ".join(references.problems(manifests))


@needs_helm
def test_two_objects_of_one_name_are_found(manifests: list[Manifest]):
    assert references.problems([*manifests, manifests[0]])[0].endswith("stands twice")


@needs_helm
@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (
            lambda one: one["rules"][0]["http"]["paths"][0]["backend"]["service"].update(name="x"),
            "x is not the Service",
        ),
        (lambda one: one.update(rules=[]), "has no host"),
    ],
)
def test_an_ingress_that_leads_nowhere_is_found(tools: Tools, spoil: Spoil, message: str):
    made = render(tools, "helm4", EXAMPLES / "gpu-8.yaml")
    spoil(named(made, "Ingress/warmroot")["spec"])
    assert message in " ".join(references.problems(made))


def test_label_selectors():
    labels = {"a": "1", "b": "2"}
    assert selects({}, labels)
    assert selects({"matchLabels": {"a": "1"}}, labels)
    assert not selects({"matchLabels": {"a": "2"}}, labels)
    wanted = {"In": True, "NotIn": False, "Exists": True, "DoesNotExist": False}
    for operator, holds in wanted.items():
        assert selects({"matchExpressions": [{"key": "a", "operator": operator, "values": ["1"]}]}, labels) is holds


def of_policy(change: Callable[[Any], None]) -> Spoil:
    return lambda manifests: change(named(manifests, "NetworkPolicy/warmroot")["spec"])


@needs_helm
@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (of_policy(lambda spec: spec["ingress"].pop(0)), "does not reach Pod/warmroot-head at port 45678"),
        (of_policy(lambda spec: spec["egress"].pop(0)), "does not reach Pod/warmroot-l40s at port 45678"),
        (of_policy(lambda spec: spec["egress"].pop(1)), "Pod/warmroot-head does not reach a name server"),
        (
            of_policy(lambda spec: spec["ingress"][2]["ports"].pop(1)),
            "operator does not reach Pod/warmroot-head at port 52365",
        ),
        (
            of_policy(lambda spec: spec["ingress"].pop(3)),
            "Prometheus does not reach Pod/warmroot-ingress at port 8080",
        ),
        (
            of_policy(lambda spec: spec["ingress"].append({"ports": [{"port": 8000, "endPort": 9000}]})),
            "Pod/warmroot-head: anyone reaches port 8265",
        ),
        (
            of_policy(lambda spec: spec["podSelector"]["matchExpressions"][0]["values"].remove("head")),
            "Pod/warmroot-head: anyone reaches port 10001",
        ),
    ],
)
def test_a_mistake_in_a_network_policy_is_found(production_rendered, spoil: Spoil, message: str):
    manifests = copy.deepcopy(production_rendered)
    assert network.problems(manifests) == []
    spoil(manifests)
    assert message in " ".join(network.problems(manifests))


@needs_helm
def test_a_redis_that_anyone_reaches_is_found(manifests: list[Manifest]):
    assert network.problems(manifests) == []
    named(manifests, "NetworkPolicy/warmroot-redis")["spec"]["ingress"][0].pop("from")
    assert "StatefulSet/warmroot-gcs: anyone reaches port 6379" in network.problems(manifests)


def of_pod(change: Callable[[Any], None]) -> Spoil:
    return lambda service: change(service["spec"]["rayClusterConfig"]["workerGroupSpecs"][1]["template"]["spec"])


def of_container(change: Callable[[Any], None]) -> Spoil:
    return of_pod(lambda pod: change(pod["containers"][0]))


@needs_helm
@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (of_pod(lambda pod: pod["securityContext"].update(runAsNonRoot=False)), "must run as a user"),
        (of_pod(lambda pod: pod["securityContext"].update(runAsUser=0)), "must run as a user"),
        (of_pod(lambda pod: pod["securityContext"].pop("seccompProfile")), "seccompProfile must be"),
        (of_pod(lambda pod: pod.update(hostNetwork=True)), "hostNetwork must not be set"),
        (of_pod(lambda pod: pod.pop("automountServiceAccountToken")), "has no use for the API server's token"),
        (of_container(lambda one: one["securityContext"].update(privileged=True)), "allowPrivilegeEscalation"),
        (of_container(lambda one: one["securityContext"]["capabilities"].update(add=["SYS_ADMIN"])), "capabilities"),
        (of_container(lambda one: one["securityContext"].pop("readOnlyRootFilesystem")), "readOnlyRootFilesystem"),
        (
            of_container(lambda one: one["env"].append({"name": "AWS_SECRET_ACCESS_KEY", "value": "x"})),
            "AWS_SECRET_ACCESS_KEY is a secret",
        ),
        (
            lambda service: service["metadata"].update(annotations={"x": "redis://:password@host:6379"}),
            "RayService/warmroot: a password stands in a URL",
        ),
    ],
)
def test_a_pod_with_too_many_rights_and_a_secret_in_plain_sight_are_found(manifests, service, spoil, message):
    assert security.problems(manifests) == []
    spoil(service)
    assert message in " ".join(security.problems(manifests))


@needs_helm
@pytest.mark.tools("promtool")
def test_a_mistake_in_the_rules_of_a_release_is_found(tools: Tools, manifests: list[Manifest]):
    assert prometheus.problems_in(tools, manifests) == []
    [upgrade] = named(manifests, "PrometheusRule/warmroot")["spec"]["groups"][-1]["rules"]
    upgrade["expr"] += ")"
    assert "could not parse expression" in " ".join(prometheus.problems_in(tools, manifests))


def test_a_secret_of_the_chart_is_found():
    secret = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "x"}}
    assert security.problems([secret]) == ["Secret/x: helm keeps it with the release; name a Secret that exists"]
