"""What KubeRay does with a RayService, on hosts of one machine: a node for each pod, then the application by REST."""

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from warmroot.deploy.checks.pods import groups
from warmroot.deploy.checks.tools import Manifest
from warmroot.deploy.ray_settings import SETTINGS, of_scratch

from .cluster_harness import wait_until
from .hosts_harness import GCS_PORT, Host, Lan, new_lan

DASHBOARD_PORT, SERVE_PORT, REDIS_PORT = 8265, 8000, 6390
REDIS_PASSWORD, RAY_TOKEN, API_KEY = "of-the-store", "of-ray", "of-a-client"
START_S = 300.0
OF_THE_IMAGE = {name: SETTINGS[name] for name in ("RAY_SERVE_HAPROXY_BINARY_PATH", "WARMROOT_HAPROXY")}


@dataclass(frozen=True)
class Pods:
    """A running cluster: the head, and one pod of each group."""

    lan: Lan
    by_group: Mapping[str, Host]
    service: Manifest
    """The RayService that they are of."""

    @property
    def head(self) -> Host:
        return self.by_group["head"]

    @property
    def redis(self) -> str:
        """host:port of the metadata's."""
        return f"{self.head.address}:{REDIS_PORT}"

    @property
    def dashboard(self) -> str:
        return f"http://{self.head.address}:{DASHBOARD_PORT}"

    @property
    def url(self) -> str:
        """The API, by the proxy of the ingress's node, as the Service of the proxies would."""
        return f"http://{self.by_group['ingress'].address}:{SERVE_PORT}"

    def deploy(self, serve_config: Any) -> None:
        """The operator's request."""
        response = self._http().put("/api/serve/applications/", json=serve_config)
        assert response.status_code == 200, response.text

    def applications(self) -> dict[str, Any]:
        return self._http().get("/api/serve/applications/").raise_for_status().json()["applications"]

    def wait_running(self, name: str, since: float = 0.0) -> dict[str, Any]:
        """What Serve tells of the application, once it runs as it was deployed after ``since``."""
        found: dict[str, Any] = {}

        def running() -> bool:
            found.update(self.applications().get(name, {}))
            assert found.get("status") != "DEPLOY_FAILED", found
            return found.get("status") == "RUNNING" and found["last_deployed_time_s"] > since

        wait_until(running, START_S, lambda: found)
        return found

    def _http(self) -> httpx.Client:
        headers = {"Authorization": f"Bearer {RAY_TOKEN}"}
        return httpx.Client(base_url=self.dashboard, headers=headers, trust_env=False, timeout=60)


@contextmanager
def pods_of(render: Callable[[str], Manifest]) -> Iterator[Pods]:
    """A host for the head and for one pod of each group of a RayService, made for the address of the head's Redis."""
    with new_lan("wrp") as lan:
        head = lan.add_host()
        start_redis(head)
        service = render(f"{head.address}:{REDIS_PORT}")
        by_group = {name: head if name == "head" else lan.add_host() for name, _ in groups(service)}
        for name, group in groups(service):
            start_node(by_group[name], head, group)
        yield Pods(lan, by_group, service)


def start_redis(host: Host) -> None:
    """The metadata's, with a password."""
    options = {"port": REDIS_PORT, "requirepass": REDIS_PASSWORD, "dir": host.scratch, "save": ""}
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    host.start(["redis-server", *words, "--protected-mode", "no"], os.environ)


def start_node(host: Host, head: Host, group: Manifest) -> None:
    """``ray start`` with the options that the operator makes of a group."""
    [container] = group["template"]["spec"]["containers"]
    given = dict(group["rayStartParams"])
    given.setdefault("num-cpus", str(container["resources"]["limits"]["cpu"]))
    labels = ",".join(f"{name}={value}" for name, value in group.get("labels", {}).items())
    own = {"head": None, "port": GCS_PORT} if host is head else {"address": f"{head.address}:{GCS_PORT}"}
    options = {
        **own,
        **given,
        **({"labels": labels} if labels else {}),
        "node-ip-address": host.address,
        "metrics-export-port": 8080,
        "dashboard-agent-listen-port": 52365,
        "object-store-memory": 80_000_000,
        "temp-dir": host.scratch,
        "block": None,
    }
    words = [f"--{name}" if value is None else f"--{name}={value}" for name, value in options.items()]
    ray = str(Path(sys.executable).with_name("ray"))
    host.start([ray, "start", *words], environment(host, container))
    wait_until(lambda: bool(host.processes("raylet/raylet")), 120.0, host.logs[-1].read_text)


def environment(host: Host, container: Manifest) -> dict[str, str]:
    """The container's: what the image, the template and its Secrets say, and the operator's token."""
    secrets = {"WARMROOT_REDIS_PASSWORD": REDIS_PASSWORD, "WARMROOT_API_KEY": API_KEY}
    variables = {one["name"]: one.get("value", secrets.get(one["name"], "")) for one in container["env"]}
    # Paths of a pod are its own; hosts share the machine's file system.
    places = {"HF_HOME": str(host.scratch / "weights"), **of_scratch(host.scratch)}
    token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": RAY_TOKEN}
    return {**os.environ, **OF_THE_IMAGE, **variables, **places, **token, "RAY_enable_worker_prestart": "0"}
