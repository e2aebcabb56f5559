"""A Ray cluster whose nodes come and go by Ray's autoscaler: a head for the ingress, and nodes for one replica each.

All of it is on one host (see ``hosts_harness``): Ray's fake provider starts every node as further processes there.
"""

import asyncio
import json
import os
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from ray.autoscaler._private.fake_multi_node.node_provider import FAKE_HEAD_NODE_ID

from warmroot.cluster.config import WarmrootConfig
from warmroot.deploy.serve_config import APP_NAME, INGRESS_DEPLOYMENT, REPLICA_DEPLOYMENT, serve_config
from warmroot.deploy.submit import submit

from .cluster_harness import wait_until
from .hosts_harness import DETECTION, GCS_PORT, Host, Lan

DASHBOARD_PORT, SERVE_PORT = 8265, 8000
MAX_NODES = 3
LOOK_S = 0.25
PROVIDER = "ray.autoscaler._private.fake_multi_node.node_provider.FakeMultiNodeProvider"


@dataclass(frozen=True)
class Sight:
    """The cluster at one moment."""

    at_s: float
    """Seconds since the first look."""
    nodes: int
    """Beside the head."""
    running: int
    starting: int
    stopping: int

    @property
    def counts(self) -> tuple[int, int, int, int]:
        return self.nodes, self.running, self.starting, self.stopping


class Autoscaled:
    """The running cluster. ``sights`` are what it looked like, one for each change."""

    def __init__(self, host: Host) -> None:
        self.host = host
        self.url = f"http://{host.address}:{SERVE_PORT}"
        self.sights: list[Sight] = []
        self._dashboard = httpx.Client(
            base_url=f"http://{host.address}:{DASHBOARD_PORT}", timeout=30.0, trust_env=False
        )
        self._began = time.monotonic()
        self._closed = threading.Event()
        self._watcher = threading.Thread(target=self._watch, daemon=True)

    def deploy(self, config: WarmrootConfig) -> None:
        """What ``warmroot deploy`` does; the ingress's place is the head, where the only proxy is."""
        wanted = serve_config(config)
        [application] = wanted["applications"]
        for deployment in application["deployments"]:
            if deployment["name"] == INGRESS_DEPLOYMENT:
                deployment["ray_actor_options"] = {"num_cpus": 0, "resources": {"ingress": 0.1}}
        wanted["proxy_location"] = "HeadOnly"
        submit(wanted, str(self._dashboard.base_url))

    def start_watching(self) -> None:
        self._watcher.start()

    def close(self) -> None:
        self._closed.set()
        self._watcher.join()

    def now_s(self) -> float:
        """Seconds since the first look."""
        return time.monotonic() - self._began

    def look(self) -> Sight:
        """The cluster now."""
        states = [replica["state"] for replica in self.replicas()]
        return Sight(
            at_s=self.now_s(),
            nodes=len(self.nodes()) - 1,
            running=states.count("RUNNING") + states.count("PENDING_MIGRATION"),
            starting=states.count("STARTING"),
            stopping=states.count("STOPPING"),
        )

    def replicas(self) -> list[dict[str, Any]]:
        """Of the model, as Serve knows them."""
        details = self._get("/api/serve/applications/")
        application = details["applications"].get(APP_NAME, {"deployments": {}})
        return application["deployments"].get(REPLICA_DEPLOYMENT, {"replicas": []})["replicas"]

    def replica_ids(self) -> set[str]:
        """Of the model's, whatever their state."""
        return {replica["replica_id"] for replica in self.replicas()}

    def drain_node(self, node: str, deadline_s: int) -> None:
        """As a cloud that takes a spot machine back tells Ray."""
        ray = str(Path(sys.executable).with_name("ray"))
        command = [ray, "drain-node", f"--address={self.host.address}:{GCS_PORT}", f"--node-id={node}"]
        why = ["--reason=DRAIN_NODE_REASON_PREEMPTION", "--reason-message=spot"]
        command += [*why, f"--deadline-remaining-seconds={deadline_s}"]
        assert self.host.start(command, self.host.environment()).wait(60) == 0, self.host.logs[-1].read_text()

    def nodes(self) -> list[str]:
        """Ids of those alive, the head among them."""
        found = self._get("/api/v0/nodes")["data"]["result"]["result"]
        return [node["node_id"] for node in found if node["state"] == "ALIVE"]

    async def until(self, condition: Callable[[Sight], bool], deadline_s: float) -> Sight:
        """What the cluster looks like once the condition holds."""
        give_up_at = time.monotonic() + deadline_s
        while True:
            with suppress(httpx.TransportError):  # on a busy machine the dashboard may not answer in time
                if condition(sight := await asyncio.to_thread(self.look)):
                    return sight
            assert time.monotonic() < give_up_at, self.story()
            await asyncio.sleep(LOOK_S)

    def story(self) -> str:
        """All that changed, a line each."""
        return "\n".join(
            f"{s.at_s:6.1f} s  {s.nodes} nodes  {s.running} running  {s.starting} starting  {s.stopping} stopping"
            for s in self.sights
        )

    def _watch(self) -> None:
        while not self._closed.wait(LOOK_S):
            with suppress(httpx.HTTPError, KeyError, TypeError):
                sight = self.look()
                if not self.sights or self.sights[-1].counts != sight.counts:
                    self.sights.append(sight)

    def _get(self, path: str) -> Any:
        return self._dashboard.get(path).raise_for_status().json()


@contextmanager
def autoscaled_cluster(idle_s: float) -> Iterator[Autoscaled]:
    """Nodes that are idle for ``idle_s`` go."""
    scratch = Path(tempfile.mkdtemp(prefix="wra", dir="/tmp"))
    with ExitStack() as stack:
        if "WARMROOT_KEEP_LOGS" not in os.environ:
            stack.callback(shutil.rmtree, scratch, ignore_errors=True)
        host = Lan(scratch, stack).add_host()
        _start_head(host, idle_s)
        cluster = Autoscaled(host)
        wait_until(lambda: _answers(cluster), 240.0, host.logs[0].read_text)
        cluster.start_watching()
        stack.callback(cluster.close)
        yield cluster


def _answers(cluster: Autoscaled) -> bool:
    with suppress(httpx.HTTPError, KeyError, TypeError):
        return len(cluster.nodes()) == 1 and not cluster.replicas()
    return False


def _start_head(host: Host, idle_s: float) -> None:
    config = host.scratch / "autoscaler.json"
    config.write_text(json.dumps(_autoscaler(host, idle_s)))
    ray = str(Path(sys.executable).with_name("ray"))
    # Not --block: then all of it would end with the first process that does, such as the server of Ray's own clients.
    command = [
        *("start", "--head", f"--port={GCS_PORT}", f"--node-ip-address={host.address}"),
        *("--num-cpus=0", '--resources={"ingress": 1}', f"--autoscaling-config={config}"),
        *("--dashboard-host=0.0.0.0", f"--dashboard-port={DASHBOARD_PORT}", "--disable-usage-stats"),
        *("--object-store-memory=80000000", f"--temp-dir={host.scratch}", "--include-log-monitor=false"),
    ]
    # No host is lost here, and where all share a few busy cores three seconds of silence are no loss.
    patient = {name: value for name, value in host.environment().items() if name not in DETECTION}
    host.start([ray, *command], patient | _of_the_fake(host))


def _of_the_fake(host: Host) -> dict[str, str]:
    """Variables of the provider and of the autoscaler that uses it."""
    return {
        "RAY_FAKE_CLUSTER": "1",
        "RAY_enable_autoscaler_v2": "1",
        "RAY_CLOUD_INSTANCE_ID": FAKE_HEAD_NODE_ID,
        "RAY_OVERRIDE_NODE_ID_FOR_TESTING": FAKE_HEAD_NODE_ID,
        "AUTOSCALER_UPDATE_INTERVAL_S": "1",
        "WARMROOT_CACHE_DIR": os.environ.get("WARMROOT_CACHE_DIR", str(host.scratch / "cache")),
    }


def _autoscaler(host: Host, idle_s: float) -> dict[str, Any]:
    """The cluster's configuration, as ``ray up`` would have it."""
    commands = ("initialization", "setup", "head_setup", "worker_setup", "head_start_ray", "worker_start_ray")
    return {
        **{f"{name}_commands": [] for name in commands},
        **{name: {} for name in ("auth", "docker", "file_mounts")},
        **{name: [] for name in ("cluster_synced_files", "rsync_exclude", "rsync_filter")},
        "upscaling_speed": 1.0,
        "cluster_name": "warmroot",
        "max_workers": MAX_NODES,
        "idle_timeout_minutes": idle_s / 60,
        "provider": {
            "type": "external",
            "module": PROVIDER,
            "gcs_address": f"{host.address}:{GCS_PORT}",
            "head_node_id": FAKE_HEAD_NODE_ID,
            "launch_multiple": True,
        },
        "head_node_type": "ray.head.default",
        "available_node_types": {
            "ray.head.default": {"resources": {"CPU": 0, "ingress": 1}, "node_config": {}, "max_workers": 0},
            "cpu": {
                "resources": {"CPU": 1, "object_store_memory": 80_000_000},
                "node_config": {},
                "min_workers": 0,
                "max_workers": MAX_NODES,
            },
        },
    }
