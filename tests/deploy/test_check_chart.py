"""The chart: what it makes is right, and a mistake in values or manifests is found."""

from collections.abc import Callable
from typing import Any

import pytest
import yaml

from warmroot.deploy.checks import custom_resources, plain, pods, ray_cluster, serve_config
from warmroot.deploy.checks.tools import CHART, EXAMPLES, Manifest, Tools, lint, read_manifests, render
from warmroot.deploy.ray_settings import SETTINGS

helms = pytest.mark.parametrize(
    "helm", [pytest.param(name, marks=pytest.mark.tools(name)) for name in ("helm3", "helm4")]
)
needs_helm = pytest.mark.tools("helm4")


def values(tmp_path, **keys: Any):
    path = tmp_path / "values.yaml"
    path.write_text(yaml.safe_dump(keys))
    return path


def env(pod_template: Manifest) -> dict[str, Any]:
    return {one["name"]: one.get("value") for one in pod_template["spec"]["containers"][0]["env"]}


def serve_args(service: Manifest) -> dict[str, Any]:
    return yaml.safe_load(service["spec"]["serveConfigV2"])["applications"][0]["args"]


@helms
@pytest.mark.parametrize(
    "keys",
    [
        {"ingres": {}},
        {"ingress": {"replica": 2}},
        {"config": {"model": "x", "num_replica": 2}},
        {"models": [{"model": "x", "max_num_seq": 2}]},
        {"config": {"model": "x", "api_key": "k"}},
        {"config": {"model": "x", "port": 9000}},
        {"image": {"tag": "latest"}},
        {"tls": {"channel": {"secret": "x"}}},
        {"podDisruptionBudget": {"workers": {"minAvailable": "50%"}}},
        {"workers": []},
        {"workers": [{"name": "ingress", "replicas": 1, "minReplicas": 1, "maxReplicas": 1, "hosts": 1}]},
        {"terminationGracePeriodSeconds": 5},
        {"metadataStore": {"mode": "external", "url": "redis://:secret@host"}},
        {"fullnameOverride": "x" * 48},
    ],
    ids=lambda keys: next(iter(keys)),
)
def test_wrong_values_are_refused(tools: Tools, tmp_path, helm: str, keys: dict[str, Any]):
    assert lint(tools, helm, values(tmp_path, **keys))
    with pytest.raises(ValueError, match=helm):
        render(tools, helm, values(tmp_path, **keys))


@helms
def test_what_is_needed_is_said(tools: Tools, tmp_path, helm: str):
    with pytest.raises(ValueError, match=r"metadataStore\.url: needed"):
        render(tools, helm, values(tmp_path, metadataStore={"mode": "external"}))


@needs_helm
def test_a_good_release_has_no_problems(manifests: list[Manifest]):
    assert (
        custom_resources.problems(manifests)
        == ray_cluster.problems(manifests)
        == serve_config.problems(manifests)
        == []
    )


@needs_helm
@pytest.mark.tools("kubernetes-validate")
def test_a_misspelt_key_in_a_pod_template_is_found(tools: Tools, manifests: list[Manifest], service: Manifest):
    assert pods.problems(tools, manifests, "1.31") == []
    pod = service["spec"]["rayClusterConfig"]["workerGroupSpecs"][1]["template"]["spec"]
    pod["containers"][0]["imagePullPolice"] = "Always"
    assert "imagePullPolice" in " ".join(pods.problems(tools, manifests, "1.31"))


@needs_helm
@pytest.mark.tools("kubernetes-validate")
def test_a_misspelt_key_in_a_plain_object_is_found(tools: Tools, manifests: list[Manifest]):
    budget = next(manifest for manifest in manifests if manifest["kind"] == "PodDisruptionBudget")
    budget["spec"]["maxUnavailible"] = 1
    assert "maxUnavailible" in " ".join(pods.problems(tools, manifests, "1.37"))


@needs_helm
@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("spec", "rayClusterSpec"), {}, "rayClusterSpec"),
        (("spec", "rayClusterConfig", "headGroupSpec", "rayStartParam"), {}, "rayStartParam"),
        (("spec", "rayClusterConfig", "enableInTreeAutoscaling"), "yes", "is not of type 'boolean'"),
    ],
)
def test_a_key_that_the_definition_does_not_know_is_found(manifests, service, path, value, message):
    holder = service
    for key in path[:-1]:
        holder = holder[key]
    holder[path[-1]] = value
    assert message in " ".join(custom_resources.problems(manifests))


def test_a_kind_without_definition_is_found():
    assert custom_resources.problems([{"apiVersion": "x/v1", "kind": "X", "metadata": {"name": "y"}}]) == [
        "X/y: no definition of x/v1 is known here"
    ]


def of_cluster(change: Callable[[Any], None]) -> Callable[[Any], None]:
    return lambda service: change(service["spec"]["rayClusterConfig"])


def of_worker(change: Callable[[Any], None]) -> Callable[[Any], None]:
    return of_cluster(lambda cluster: change(cluster["workerGroupSpecs"][1]))


def of_container(change: Callable[[Any], None]) -> Callable[[Any], None]:
    return of_worker(lambda group: change(group["template"]["spec"]["containers"][0]))


def of_head(change: Callable[[Any], None]) -> Callable[[Any], None]:
    return of_cluster(lambda cluster: change(cluster["headGroupSpec"]))


def container(group: Any) -> Any:
    return group["template"]["spec"]["containers"][0]


def in_steps(*, autoscales: bool = True, **options: Any) -> Callable[[Any], None]:
    given = {
        "gatewayClassName": "envoy",
        "stepSizePercent": 20,
        "intervalSeconds": 60,
        "maxSurgePercent": 50,
        **options,
    }

    def spoil(service: Any) -> None:
        service["spec"]["upgradeStrategy"] = {
            "type": "NewClusterWithIncrementalUpgrade",
            "clusterUpgradeOptions": given,
        }
        service["spec"]["rayClusterConfig"]["enableInTreeAutoscaling"] = autoscales

    return spoil


@needs_helm
@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda service: service["metadata"].update(name="x" * 48), "at most 47"),
        (lambda service: service["spec"].update(rayClusterDeletionDelaySeconds=60), "deleted after 60 s"),
        (of_cluster(lambda cluster: cluster.update(rayVersion="2.9.0")), "rayVersion 2.9.0"),
        (
            of_cluster(lambda cluster: cluster["gcsFaultToleranceOptions"].update(externalStorageNamespace="x")),
            "externalStorageNamespace must not be set",
        ),
        (of_cluster(lambda cluster: cluster["autoscalerOptions"].update(version="v1")), "must be v2"),
        (of_cluster(lambda cluster: cluster["headGroupSpec"].update(headService={"metadata": {}})), "services must"),
        (of_cluster(lambda cluster: cluster["authOptions"].update(enableK8sTokenAuth=True)), "enableK8sTokenAuth"),
        (
            of_cluster(lambda cluster: cluster["gcsFaultToleranceOptions"].update(backend="rocksdb")),
            "either in a Redis or in rocksdb",
        ),
        (
            of_cluster(lambda cluster: cluster["workerGroupSpecs"][1].update(groupName="ingress")),
            "two groups are named",
        ),
        (in_steps(gatewayClassName=""), "an upgrade in steps needs gatewayClassName"),
        (in_steps(stepSizePercent=80), "must not be above its maxSurgePercent"),
        (in_steps(autoscales=False), "an upgrade in steps needs the autoscaler"),
        (of_head(lambda group: group["rayStartParams"].pop("num-cpus")), "the head must have num-cpus 0"),
        (of_head(lambda group: container(group)["resources"]["limits"].update(memory="2Gi")), "needs 8Gi of memory"),
        (of_head(lambda group: container(group)["ports"].pop()), "the head does not declare dash-metrics"),
        (
            of_head(lambda group: group["template"]["metadata"]["labels"].update({"app.kubernetes.io/name": "x"})),
            "the label app.kubernetes.io/name is the operator's",
        ),
        (of_worker(lambda group: group.update(minReplicas=5)), "between minReplicas (5)"),
        (of_worker(lambda group: group.pop("maxReplicas")), "minReplicas and maxReplicas are needed"),
        (
            of_worker(lambda group: group["template"]["spec"]["volumes"][-1]["emptyDir"].update(sizeLimit="2Ti")),
            "/dev/shm needs a sizeLimit below",
        ),
        (of_worker(lambda group: group["rayStartParams"].update(labels="a=b")), "belong into labels"),
        (
            of_worker(lambda group: group.update(resources={"GPU": "8"}, rayStartParams={"num-gpus": "8"})),
            "either in rayStartParams",
        ),
        (of_worker(lambda group: group["template"]["spec"].update(restartPolicy="Always")), "must be Never"),
        (of_worker(lambda group: group["template"]["spec"]["containers"][0].update(name="x")), "must be the first"),
        (of_container(lambda one: one["env"].append({"name": "RAY_REDIS_ADDRESS", "value": "x"})), "is set by"),
        (of_container(lambda one: one["env"].append({"name": "HF_HOME", "value": "x"})), "HF_HOME: set twice"),
        (of_container(lambda one: one.update(env=[])), "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S must end"),
        (of_container(lambda one: one["resources"]["requests"].update(cpu="1")), "requests must be limits"),
        (of_container(lambda one: [one["resources"][of].pop("memory") for of in one["resources"]]), "limits of cpu"),
        (of_container(lambda one: one.update(image="warmroot:latest")), "has no version"),
        (of_container(lambda one: one.update(readinessProbe={})), "readinessProbe replaces what the operator asks"),
        (of_container(lambda one: one.update(lifecycle={"preStop": {}})), "preStop delays the signal"),
    ],
)
def test_what_the_operator_would_refuse_is_found(manifests, service, spoil, message):
    spoil(service)
    assert message in " ".join(ray_cluster.problems(manifests))


def test_a_release_without_a_service_is_found():
    assert ray_cluster.problems([]) == ["there is no RayService"]


def of_application(change: Callable[[Any], None]) -> Callable[[Any], None]:
    return lambda config: change(config["applications"][0])


def of_args(**keys: Any) -> Callable[[Any], None]:
    return of_application(lambda application: application["args"].update(keys))


@needs_helm
@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda config: config.update(proxy_locaton="EveryNode"), "proxy_locaton: unknown key"),
        (lambda config: config.update(proxy_location="HeadOnly"), "proxy_location: must be EveryNode"),
        (lambda config: config.update(applications=3), "applications: Input should be a valid list"),
        (lambda config: config["http_options"].update(prot=1), "http_options.prot: unknown key"),
        (of_application(lambda one: one.update(import_pth="x")), "import_pth: unknown key"),
        (of_application(lambda one: one.update(import_path="x:y")), "must be warmroot.deploy.app:build_app"),
        (of_args(num_replica=2), "num_replica: unknown key; did you mean num_replicas?"),
        (of_args(tensor_parallel_size=16), "a replica needs"),
        (of_args(pipeline_parallel_size=3), "3 stages need a group"),
        (of_args(node_labels=["pool=blue"]), "there are none"),
        (of_args(api_key="k"), "api_key: the cluster would show it"),
        (of_application(lambda one: one["args"].pop("threads_per_replica")), "threads_per_replica is needed"),
        (of_application(lambda one: one["deployments"][0].update(name="Ingres")), "there is no such deployment"),
        (of_application(lambda one: one["deployments"][0].update(num_replica=2)), "Ingress.num_replica: unknown key"),
        (
            of_application(lambda one: one["deployments"][0]["ray_actor_options"].update(num_cpu=1)),
            "ray_actor_options.num_cpu: unknown key",
        ),
        (
            of_application(
                lambda one: one["deployments"].append({"name": "Replica", "autoscaling_config": {"min": 1}})
            ),
            "autoscaling_config.min: unknown key",
        ),
    ],
)
def test_what_serve_would_ignore_or_refuse_is_found(manifests, service, spoil, message):
    config = yaml.safe_load(service["spec"]["serveConfigV2"])
    spoil(config)
    service["spec"]["serveConfigV2"] = yaml.safe_dump(config)
    assert message in " ".join(serve_config.problems(manifests))


def test_a_key_that_stands_twice_is_found():
    with pytest.raises(ValueError, match="'b' stands twice"):
        read_manifests("a:\n  b: 1\n  b: 2\n")


@needs_helm
def test_pods_have_the_settings_that_serving_needs(service: Manifest):
    dockerfile = (CHART.parents[1] / "docker" / "Dockerfile").read_text()
    # A local cluster stops at once, and ends its processes by a mark; pods drain, and end with all that is in them.
    here = {"RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S", "SPT_NOENV"}
    for _, group in pods.groups(service):
        given = env(group["template"])
        for name, value in SETTINGS.items():
            if name.endswith("PATH") or name == "WARMROOT_HAPROXY":
                assert f"{name}=/opt/warmroot/bin/" in dockerfile
            elif name == "RAY_AUTH_MODE":
                assert service["spec"]["rayClusterConfig"]["authOptions"] == {"mode": "token"}
            elif name not in here:
                assert given[name].split()[0] == value


@needs_helm
def test_secrets_are_references(service: Manifest):
    args = serve_args(service)
    assert args["api_keys_file"] == "/etc/warmroot/keys/keys.yaml"
    head = service["spec"]["rayClusterConfig"]["headGroupSpec"]["template"]["spec"]
    references = {
        one["name"]: one["valueFrom"]["secretKeyRef"] for one in head["containers"][0]["env"] if "valueFrom" in one
    }
    assert references == {
        "HF_TOKEN": {"name": "hf-token", "key": "hf_token"},
        "WARMROOT_ADMIN_API_KEY": {"name": "warmroot-admin", "key": "admin-api-key"},
    }
    assert {"name": "api-keys", "secret": {"secretName": "warmroot-keys", "defaultMode": 0o440}} in head["volumes"]


@needs_helm
def test_the_ingress_has_nodes_of_its_own_and_a_gang_comes_whole(service: Manifest):
    deployment = yaml.safe_load(service["spec"]["serveConfigV2"])["applications"][0]["deployments"][0]
    ingress, workers = service["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    assert deployment["ray_actor_options"]["label_selector"] == ingress["labels"] == {"warmroot.io/role": "ingress"}
    assert workers["labels"]["warmroot.io/role"] == "replica"
    assert serve_args(service)["node_labels"] == ["warmroot.io/role=replica"]
    assert (
        workers["numOfHosts"],
        workers["template"]["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"],
    ) == (2, 8)


@needs_helm
def test_several_models_share_an_application(tools: Tools, tmp_path):
    models = [{"model": "a", "threads_per_replica": 1}, {"model": "b", "threads_per_replica": 2, "num_replicas": 2}]
    made = render(
        tools, "helm4", values(tmp_path, models=models, rayTokenAuth=False, metadataStore={"mode": "embedded"})
    )
    assert serve_config.problems(made) == []
    service = next(one for one in made if one["kind"] == "RayService")
    assert serve_args(service)["models"] == models
    assert "authOptions" not in service["spec"]["rayClusterConfig"]
    assert [one["metadata"]["name"] for one in made if one["kind"] == "StatefulSet"] == ["warmroot-gcs"]


@needs_helm
def test_plain_manifests_are_what_the_chart_makes(tools: Tools):
    assert plain.PLAIN.read_text() == plain.text(tools)


@needs_helm
def test_plain_manifests_of_yesterday_are_found(tools: Tools, tmp_path, monkeypatch):
    old = tmp_path / "rayservice.yaml"
    old.write_text(plain.PLAIN.read_text().replace("630", "60"))
    monkeypatch.setattr(plain, "PLAIN", old)
    assert "is not what the chart makes" in plain.problems(tools)[0]


@pytest.mark.tools("kubectl")
@pytest.mark.parametrize(
    ("patch", "message"),
    [
        ({"op": "replace", "path": "/spec/rayClusterConfig/rayVersion", "value": "2.9.0"}, "rayVersion 2.9.0"),
        ({"op": "replace", "path": "/spec/nowhere/x", "value": 1}, "nowhere"),
    ],
)
def test_a_mistake_in_an_overlay_is_found(tools: Tools, tmp_path, patch, message):
    (tmp_path / "base").symlink_to(plain.PLAIN.parent)
    overlay = tmp_path / "overlay"
    overlay.mkdir()
    content = {
        "resources": ["../base"],
        "patches": [{"target": {"kind": "RayService"}, "patch": yaml.safe_dump([patch])}],
    }
    (overlay / "kustomization.yaml").write_text(yaml.safe_dump(content))
    assert message in " ".join(plain.overlay_problems(tools, overlay))


def test_every_example_says_what_it_is_for():
    for path in EXAMPLES.glob("*.yaml"):
        assert path.read_text().startswith("# ")


@needs_helm
def test_another_number_of_copies_does_not_build_the_application_anew(tools: Tools, tmp_path):
    def application(replicas: int) -> Any:
        keys = {"config": {"num_replicas": replicas}, "ingress": {"replicas": replicas}}
        made = render(tools, "helm4", values(tmp_path, **keys))
        service = next(one for one in made if one["kind"] == "RayService")
        return yaml.safe_load(service["spec"]["serveConfigV2"])["applications"][0]

    few, many = application(2), application(3)
    assert few["args"] == many["args"]
    # Ingresses that are several share quotas, and count apart: of that they are told.
    assert (application(1)["args"].get("num_ingress"), few["args"]["num_ingress"]) == (None, 2)
    assert {one["name"]: one["num_replicas"] for one in many["deployments"]} == {"Ingress": 3, "Replica": 3}
