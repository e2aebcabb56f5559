"""The CPU example of the chart, as KubeRay would run it: pods are hosts, the application comes by Serve's REST API."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from warmroot.deploy.checks.tools import EXAMPLES, Manifest, Tools, render

from .cluster_harness import wait_until
from .hosts_harness import why_no_hosts
from .pods_harness import API_KEY, RAY_TOKEN, Pods, pods_of

pytestmark = [
    pytest.mark.slow,
    pytest.mark.hosts,
    pytest.mark.cluster,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(why_no_hosts() is not None, reason=str(why_no_hosts())),
    pytest.mark.skipif(shutil.which("redis-server") is None, reason="needs redis-server"),
    pytest.mark.skipif(not Tools().has("helm4"), reason="needs helm: run make check-deploy"),
]

SECRETS = {
    "auth": {"apiKey": {"secretName": "client", "key": "api-key"}},
    "metadataStore": {"mode": "external", "passwordSecret": {"name": "store", "key": "password"}},
    "gcsFaultTolerance": {"mode": "none"},
}


def service(folder: Path, redis: str, **keys: Any) -> Manifest:
    """The example's RayService, with ``keys`` of its values replaced."""
    values = folder / "values.yaml"
    given: dict[str, Any] = yaml.safe_load((EXAMPLES / "cpu.yaml").read_text()) | SECRETS | keys
    given["metadataStore"]["url"] = f"redis://{redis}"
    values.write_text(yaml.safe_dump(given))
    return next(one for one in render(Tools(), "helm4", values) if one["kind"] == "RayService")


def serve_config(made: Manifest) -> Any:
    return yaml.safe_load(made["spec"]["serveConfigV2"])


def replicas(application: dict[str, Any]) -> set[str]:
    return {one["replica_id"] for one in application["deployments"]["Replica"]["replicas"]}


@pytest.fixture(scope="module")
def pods(tmp_path_factory) -> Iterator[Pods]:
    with pods_of(lambda redis: service(tmp_path_factory.mktemp("values"), redis)) as running:
        yield running


def client(pods: Pods, key: str = API_KEY) -> httpx.Client:
    headers = {"Authorization": f"Bearer {key}"}
    return httpx.Client(base_url=pods.url, headers=headers, trust_env=False, timeout=120)


def answer(pods: Pods, model: str) -> str:
    body = {"model": model, "prompt": "The capital of France is", "max_tokens": 8, "temperature": 0}
    with client(pods) as http:
        response = http.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]["text"]


def answers(pods: Pods, model: str) -> bool:
    """Whether it does by now: a proxy may still know the ingress of the application that was replaced."""
    try:
        return "Paris" in answer(pods, model)
    except (httpx.TransportError, AssertionError):
        return False


def test_the_rendered_serve_config_is_deployed_and_answers(pods: Pods):
    pods.deploy(serve_config(pods.service))
    deployments = pods.wait_running("warmroot")["deployments"]
    where = {
        name: {replica["node_ip"] for replica in deployment["replicas"]} for name, deployment in deployments.items()
    }
    assert where == {"Ingress": {pods.by_group["ingress"].address}, "Replica": {pods.by_group["cpu"].address}}
    assert len(deployments["Replica"]["replicas"]) == 2
    assert "Paris" in answer(pods, "smollm2")


def test_another_number_of_replicas_leaves_the_others_alone(pods: Pods, tmp_path: Path):
    before = pods.applications()["warmroot"]
    config = {"model": "smollm2", "num_replicas": 1, "threads_per_replica": 2, "device": "cpu"}
    pods.deploy(serve_config(service(tmp_path, pods.redis, config=config)))
    after = pods.wait_running("warmroot", before["last_deployed_time_s"])
    wait_until(lambda: len(replicas(pods.applications()["warmroot"])) == 1, 120.0, lambda: after)
    assert replicas(pods.applications()["warmroot"]) < replicas(before)
    assert "Paris" in answer(pods, "smollm2")


def test_keys_come_from_the_pods_environment(pods: Pods):
    with client(pods, "another") as http:
        assert http.get("/v1/models").status_code == 401
        assert http.get("/health").status_code == 200
    with client(pods) as http:
        assert [model["id"] for model in http.get("/v1/models").json()["data"]] == ["smollm2"]


def test_the_command_deploys_on_the_running_cluster(pods: Pods):
    before = pods.applications()["warmroot"]["last_deployed_time_s"]
    flags = ["--served-model-name", "small", "--threads-per-replica", "2", "--device", "cpu"]
    store = ["--metadata-store", f"redis://{pods.redis}"]
    environment = {**os.environ, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": RAY_TOKEN}
    command = [
        str(Path(sys.executable).with_name("warmroot")),
        "deploy",
        "smollm2",
        "--address",
        pods.dashboard,
        *flags,
        *store,
    ]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "warmroot is served" in done.stderr
    assert pods.applications()["warmroot"]["last_deployed_time_s"] > before
    wait_until(lambda: answers(pods, "small"), 60.0)


def test_several_models_are_served_by_one_ingress(pods: Pods, tmp_path: Path):
    before = pods.applications()["warmroot"]["last_deployed_time_s"]
    own = {"model": "smollm2", "threads_per_replica": 1, "max_model_len": 512}
    models = [{**own, "served_model_name": name} for name in ("first", "second")]
    pods.deploy(serve_config(service(tmp_path, pods.redis, models=models, config={"device": "cpu"})))
    assert {"Replica-first", "Replica-second"} <= pods.wait_running("warmroot", before)["deployments"].keys()
    assert answer(pods, "first") == answer(pods, "second")
    with client(pods) as http:
        assert [model["id"] for model in http.get("/v1/models").json()["data"]] == ["first", "second"]
        models = {replica["model"] for replica in http.get("/load").json()["replicas"]}
    assert models == {"first", "second"}
