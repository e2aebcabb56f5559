"""The chart's CPU example without Kubernetes: its ``serveConfigV2`` on a ``ray start --head`` of this machine.

Serve gets it by its REST API, as KubeRay sends it. There is one node, with the labels of the ingress's, which takes
replicas too; pods as hosts of their own are in ``test_pods_serving.py``.
"""

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from warmroot.deploy import sweeper
from warmroot.deploy.checks.pods import groups, services, variables
from warmroot.deploy.checks.tools import EXAMPLES, Manifest, Tools, render
from warmroot.deploy.local_ray import free_port, own_places
from warmroot.deploy.ray_settings import LOOPBACK_VARIABLE, SETTINGS

from .cluster_harness import wait_until

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.model,
    pytest.mark.skipif(not Tools().has("helm4"), reason="needs helm: run make check-deploy"),
]

TOKEN = "of-ray"
CHANGED: dict[str, Any] = {
    "metadataStore": {"mode": "embedded"},
    "gcsFaultTolerance": {"mode": "none"},
}
"""Values: a Redis would have to be started too."""


class Head:
    """A Ray cluster of one node, and its dashboard."""

    def __init__(self, service: Manifest) -> None:
        # HAProxy's sockets are there: their paths must be short.
        self._scratch = Path(tempfile.mkdtemp(prefix="wrc", dir="/tmp"))
        self._log = self._scratch / "ray.log"
        dashboard = free_port()
        ingress = groups(service)[1][1]
        options = {
            "port": free_port(),
            "dashboard-host": "127.0.0.1",
            "dashboard-port": dashboard,
            "dashboard-agent-listen-port": free_port(),
            "ray-client-server-port": free_port(),
            "metrics-export-port": free_port(),
            "node-ip-address": "127.0.0.1",
            "num-cpus": 5,
            "labels": ",".join(f"{name}={value}" for name, value in ingress["labels"].items()),
            "object-store-memory": 80_000_000,
            "temp-dir": self._scratch,
        }
        words = [f"--{name}={value}" for name, value in options.items()]
        command = [str(Path(sys.executable).with_name("ray")), "start", "--head", "--block", "--no-monitor", *words]
        with self._log.open("w") as log:
            streams = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log, "start_new_session": True}
            self._process = subprocess.Popen(command, env=self._environment(ingress), **streams)  # type: ignore[call-overload]
        headers = {"Authorization": f"Bearer {TOKEN}"}
        self._http = httpx.Client(
            base_url=f"http://127.0.0.1:{dashboard}", headers=headers, trust_env=False, timeout=60
        )

    def _environment(self, group: Manifest) -> dict[str, str]:
        """The container's variables, but for its paths, and Ray's token, which the operator adds."""
        given = {name: value for name, value in variables(group["template"]["spec"]["containers"][0]).items() if value}
        own = {
            "HF_HOME": os.environ.get("HF_HOME", str(self._scratch / "weights")),
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": TOKEN,
            "WARMROOT_HTTP_HOST": "127.0.0.1",
            LOOPBACK_VARIABLE: "0",
            sweeper.MARK: str(self._scratch),
        }
        return {**os.environ, **SETTINGS, **given, **own_places(self._scratch), **own}

    def close(self) -> None:
        self._http.close()
        sweeper.sweep(self._scratch)
        self._process.wait()

    def deploy(self, config: Any) -> None:
        """What the operator does once the dashboard answers."""
        wait_until(self._answers, 120, self._log.read_text)
        response = self._http.put("/api/serve/applications/", json=config)
        assert response.status_code == 200, response.text

    def application(self) -> dict[str, Any]:
        return self._http.get("/api/serve/applications/").raise_for_status().json()["applications"].get("warmroot", {})

    def _answers(self) -> bool:
        assert self._process.poll() is None, self._log.read_text()
        try:
            return self._http.get("/api/serve/applications/").status_code == 200
        except httpx.TransportError:
            return False


@pytest.fixture(scope="module")
def service(tmp_path_factory) -> Manifest:
    values = yaml.safe_load((EXAMPLES / "cpu.yaml").read_text()) | CHANGED
    values["config"]["node_labels"] = ["warmroot.io/role=ingress"]
    path = tmp_path_factory.mktemp("values") / "values.yaml"
    path.write_text(yaml.safe_dump(values))
    [made] = services(render(Tools(), "helm4", path))
    return made


@pytest.fixture
def head(service: Manifest) -> Iterator[Head]:
    running = Head(service)
    try:
        yield running
    finally:
        running.close()


def test_the_rendered_config_answers_requests(head: Head, service: Manifest):
    config = yaml.safe_load(service["spec"]["serveConfigV2"])
    port = config["http_options"]["port"] = free_port()
    head.deploy(config)

    def runs() -> bool:
        status = head.application().get("status")
        assert status != "DEPLOY_FAILED", head.application()
        return status == "RUNNING"

    wait_until(runs, 180, head.application)
    copies = {name: len(one["replicas"]) for name, one in head.application()["deployments"].items()}
    assert copies == {"Ingress": 1, "Replica": 2}
    body = {"model": "smollm2", "prompt": "The capital of France is", "max_tokens": 8, "temperature": 0}
    answer = httpx.post(f"http://127.0.0.1:{port}/v1/completions", json=body, trust_env=False, timeout=120)
    assert answer.status_code == 200, answer.text
    assert "Paris" in answer.json()["choices"][0]["text"]
