"""What the chart makes of values that operators change: upgrades, autoscaling, notes, the pod of ``helm test``."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from warmroot.cluster.application_args import read_models
from warmroot.cluster.autoscaling_config import AutoscalingConfig
from warmroot.cluster.config_file import load_config
from warmroot.deploy.checks import pods
from warmroot.deploy.checks.tools import CHART, EXAMPLES, RELEASE, Manifest, Tools, read_manifests, render
from warmroot.deploy.serve_config import serve_config

needs_helm = pytest.mark.tools("helm4")


def made(tmp_path: Path, **keys: Any) -> list[Manifest]:
    path = tmp_path / "values.yaml"
    path.write_text(yaml.safe_dump(keys))
    return render(Tools(), "helm4", path)


def service_of(manifests: list[Manifest]) -> Manifest:
    [service] = pods.services(manifests)
    return service


def application_of(manifests: list[Manifest]) -> Any:
    return yaml.safe_load(service_of(manifests)["spec"]["serveConfigV2"])["applications"][0]


def notes(example: str) -> str:
    """What ``helm install`` prints after it; helm 3 would ask a cluster first."""
    words = ["install", RELEASE, CHART, "--dry-run=client", "--values", EXAMPLES / f"{example}.yaml"]
    good, output = Tools().run("helm4", *words)
    assert good, output
    return output.partition("NOTES:\n")[2]


@needs_helm
def test_a_new_version_of_the_chart_starts_no_pod_anew(tools: Tools, tmp_path: Path):
    copy = tmp_path / "chart"
    shutil.copytree(CHART, copy)
    about = copy / "Chart.yaml"
    about.write_text(about.read_text().replace("version: 0.1.0\n", "version: 9.9.9\n", 1))
    good, output = tools.run("helm4", "template", RELEASE, copy, "--values", EXAMPLES / "cpu.yaml")
    assert good
    new, old = read_manifests(output), render(tools, "helm4", EXAMPLES / "cpu.yaml")
    assert service_of(new)["metadata"]["labels"]["helm.sh/chart"] == "warmroot-9.9.9"
    assert service_of(new)["spec"] == service_of(old)["spec"]
    started = [{name: pod for name, pod in pods.all_pods(made).items() if "test" not in name} for made in (new, old)]
    assert started[0] == started[1]


@needs_helm
def test_kuberay_finds_the_head_by_its_own_labels(manifests: list[Manifest]):
    for pod in pods.ray_pods(manifests).values():
        labels = pod["metadata"]["labels"].keys()
        assert not {"app.kubernetes.io/name", "app.kubernetes.io/created-by"} & labels
        assert not any(label.startswith("ray.io/") for label in labels)


@needs_helm
def test_memory_is_shared_where_ranks_are(manifests: list[Manifest], service: Manifest):
    mounted = {
        name: [one["mountPath"] for one in group["template"]["spec"]["containers"][0]["volumeMounts"]]
        for name, group in pods.groups(service)
    }
    assert {name for name, paths in mounted.items() if "/dev/shm" in paths} == {"h200"}


@needs_helm
def test_an_upgrade_in_steps(tmp_path: Path):
    given = {"gatewayClassName": "envoy", "stepSizePercent": 10, "intervalSeconds": 30, "maxSurgePercent": 40}
    steps = {"upgradeStrategy": "NewClusterWithIncrementalUpgrade", "incrementalUpgrade": given}
    manifests = made(tmp_path, **steps)
    assert service_of(manifests)["spec"]["upgradeStrategy"] == {
        "type": "NewClusterWithIncrementalUpgrade",
        "clusterUpgradeOptions": given,
    }
    # KubeRay makes no Service of all proxies then, which the pod of helm test would ask.
    assert [one for one in manifests if one["kind"] == "Pod"] == []
    with pytest.raises(ValueError, match="KubeRay makes itself"):
        made(tmp_path, **steps, httpRoute={"enabled": True, "parentRefs": [{"name": "public"}]})
    with pytest.raises(ValueError, match=r"incrementalUpgrade\.gatewayClassName: needed"):
        made(tmp_path, upgradeStrategy="NewClusterWithIncrementalUpgrade")


@needs_helm
@pytest.mark.parametrize("names", [{}, {"served_model_name": ["small", "s"]}, {"served_model_name": "small"}])
@pytest.mark.parametrize("least", [0, 2])
def test_replicas_follow_the_work_as_the_command_has_it(tmp_path: Path, names: dict[str, Any], least: int):
    scaling: dict[str, Any] = {
        "min_replicas": least,
        "max_replicas": 4,
        "target_queue_wait": 0.5,
        "ttft_slo": 1.5,
        "itl_slo": 0.125,
        "max_kv_usage": 0.75,
        "upscale_delay": 1.5,
        "downscale_delay": 60.5,
        "scale_to_zero_delay": 300.5,
        "max_upscale_step": 3,
        "max_downscale_step": 2,
    }
    assert scaling.keys() == AutoscalingConfig.model_fields.keys()
    config = {"model": "smollm2", "threads_per_replica": 2, "replica_start_timeout": 4000.0, **scaling, **names}
    chart = application_of(made(tmp_path, config=config, metadataStore={"mode": "embedded"}))
    [command] = serve_config(load_config(config))["applications"]
    of_chart = {"node_labels": ["warmroot.io/role=replica"], "shutdown_grace": 570, "metadata_store": "embedded"}
    given = {
        key: [value] if key == "served_model_name" and isinstance(value, str) else value
        for key, value in chart["args"].items()
    }
    assert given == command["args"] | of_chart
    assert chart["deployments"][1] == command["deployments"][1]


@needs_helm
def test_one_pod_at_a_time_of_those_that_there_always_are_may_be_evicted(tmp_path: Path):
    def budgets(**keys: Any) -> dict[str, int]:
        of_kind = [one for one in made(tmp_path, **keys) if one["kind"] == "PodDisruptionBudget"]
        return {one["metadata"]["name"].removeprefix("warmroot-"): one["spec"]["minAvailable"] for one in of_kind}

    assert budgets() == {"head": 1, "ingress": 0, "worker": 0}
    group: dict[str, Any] = {"replicas": 2, "maxReplicas": 4, "resources": {"cpu": "4", "memory": "8Gi"}}
    groups = [
        {"name": "single", "minReplicas": 2, "hosts": 1} | group,
        {"name": "pairs", "minReplicas": 1, "hosts": 2} | group,
    ]
    assert budgets(workers=groups, ingress={"replicas": 3}) == {"head": 1, "ingress": 2, "worker": 3}
    none = [groups[0] | {"minReplicas": 0}]
    assert budgets(workers=none) == {"head": 1, "ingress": 0, "worker": 0}
    given = {"head": {"minAvailable": 0}, "workers": {"minAvailable": 5}}
    assert budgets(workers=groups, podDisruptionBudget=given) == {"head": 0, "ingress": 0, "worker": 5}


@needs_helm
def test_a_release_has_labels_and_annotations_of_its_own(tmp_path: Path):
    manifests = made(
        tmp_path, labels={"kueue.x-k8s.io/queue-name": "q"}, annotations={"a": "b"}, initializingTimeout="2h"
    )
    metadata = service_of(manifests)["metadata"]
    assert metadata["labels"]["kueue.x-k8s.io/queue-name"] == "q"
    assert metadata["annotations"] == {"a": "b", "ray.io/initializing-timeout": "2h"}


@needs_helm
def test_channels_speak_tls_with_the_files_of_a_secret(tmp_path: Path):
    manifests = made(tmp_path, tls={"channel": {"secretName": "channel"}})
    mount = {"name": "channel-tls", "mountPath": "/etc/warmroot/channel", "readOnly": True}
    for _, group in pods.groups(service_of(manifests)):
        spec = group["template"]["spec"]
        assert mount in spec["containers"][0]["volumeMounts"]
        assert {"name": "channel-tls", "secret": {"secretName": "channel", "defaultMode": 0o440}} in spec["volumes"]
    [config] = read_models(application_of(manifests)["args"], {})
    files = {"certfile": "tls.crt", "keyfile": "tls.key", "ca_certs": "ca.crt"}
    assert config.tls.channel == {key: f"/etc/warmroot/channel/{file}" for key, file in files.items()}


@needs_helm
@pytest.mark.tools("promtool")
def test_an_upgrade_that_hangs_fires_for_this_release_alone(tmp_path: Path):
    manifests = made(tmp_path, monitoring={"prometheusRule": {"enabled": True}})
    [rules] = [one["spec"] for one in manifests if one["kind"] == "PrometheusRule"]
    rules["groups"] = rules["groups"][-1:]
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump(rules))

    def fires(condition: str, name: str, namespace: str) -> bool:
        labels = f'condition="{condition}",name="{name}",namespace="{namespace}"'
        series = {"series": f"kuberay_service_condition_upgrade_in_progress{{{labels}}}", "values": "1x70"}
        nothing = {"eval_time": "65m", "alertname": "WarmrootUpgradeHangs"}
        tests = {
            "rule_files": ["rules.yaml"],
            "tests": [{"interval": "1m", "input_series": [series], "alert_rule_test": [nothing]}],
        }
        (tmp_path / "tests.yaml").write_text(yaml.safe_dump(tests))
        return "alertname" in " ".join(Tools().problems("promtool", "test", "rules", tmp_path / "tests.yaml"))

    assert fires("true", RELEASE, "default")
    assert not fires("false", RELEASE, "default")
    assert not fires("true", RELEASE, "other")
    assert not fires("true", "other", "default")


@needs_helm
def test_the_pod_of_helm_test_asks_the_model_if_it_has_a_key(tmp_path: Path):
    def container(**auth: Any) -> Any:
        pod = next(one for one in made(tmp_path, **auth) if one["kind"] == "Pod")
        assert pod["metadata"]["annotations"]["helm.sh/hook"] == "test"
        return pod["spec"]["containers"][0]

    asks = container()
    assert "warmroot complete" in asks["args"][0]
    assert "--url http://warmroot-serve-svc:8000" in asks["args"][0]
    assert asks["env"] == [{"name": "KEYS", "value": ""}]
    file, key = {"secretName": "hashes", "key": "keys.yaml"}, {"secretName": "plain", "key": "k"}
    of_secret = [{"name": "KEYS", "valueFrom": {"secretKeyRef": {"name": "plain", "key": "k"}}}]
    assert container(auth={"apiKey": key})["env"] == of_secret
    assert container(auth={"apiKeysFile": file}, helmTest={"apiKey": key})["env"] == of_secret
    assert container(auth={"apiKeysFile": file})["command"][-1] == "http://warmroot-serve-svc:8000/readyz"


@needs_helm
def test_notes_are_commands_to_copy():
    text = notes("cpu")
    assert "kubectl --namespace default wait --for=condition=Ready --timeout=30m rayservice/warmroot\n" in text
    assert (
        "port-forward svc/warmroot-serve-svc 8000 &\n    URL=http://127.0.0.1:8000\n    curl $URL/v1/models\n" in text
    )
    assert "helm test warmroot --namespace default" in text
    assert "port-forward svc/warmroot-head-svc 8265" in text
    assert "The API is open to whoever reaches it" in text


@needs_helm
def test_notes_of_a_closed_release_with_upgrades_in_steps():
    text = notes("production")
    assert "get gateway warmroot-gateway" in text
    assert '-H "Authorization: Bearer $KEY"' in text
    assert "with the admin key" in text
    assert "helm test" not in text
    assert "The API is open" not in text
