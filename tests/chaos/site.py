"""The place that is hit: four hosts of one's own with Ray, Redis and Warmroot, each process under a supervisor."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from shutil import copy, copytree, which
from typing import Any

import httpx

from ..integration.cluster_harness import wait_until
from ..integration.hosts_harness import GCS_PORT, Host, HostProcess, Lan, new_lan, why_no_hosts

PORT, REDIS_PORT, GCS_REDIS_PORT = 8000, 6380, 6390
START_S = 400.0
CPUS_EACH = 4
"""That Ray may hand out on each worker."""
DISK_BYTES = 256 * 2**20
"""What each host has for logs and temporary files."""
AUDIT_LOG = "/var/tmp/audit.jsonl"
"""On the disk for logs, of whatever host the ingress runs on."""
KEYS = ("key-of-tenant-a", "key-of-tenant-b")
ADMIN_KEY = "key-of-the-admin"
STEP_TIMEOUT_S = 10.0

ROLES = {
    "replica": "ray::ServeReplica:warmroot:Replica",
    "rank": "ray::ShardWorker",
    "ingress": "ray::ServeReplica:warmroot:Ingress",
    "controller": "ray::ServeController",
    "gcs": "gcs_server",
    "raylet": "raylet/raylet",
    "haproxy": "bin/haproxy",
    "redis": f":{REDIS_PORT}",
}
"""What the command of a process says of its part."""
_DEPLOY = """
import json, sys, ray
from ray import serve
from warmroot.cluster.config import WarmrootConfig
from warmroot.deploy.app import APP_NAME, application
from warmroot.deploy.local_ray import RAY_NAMESPACE
address, port, groups = sys.argv[1], int(sys.argv[2]), json.loads(sys.argv[3])
ray.init(address=address, namespace=RAY_NAMESPACE, log_to_driver=False)
serve.start(http_options={"host": "0.0.0.0", "port": port, "location": "EveryNode"})
configs = [WarmrootConfig.from_keys(group) for group in groups]
serve.run(application(configs), name=APP_NAME, route_prefix="/", blocking=False)
"""
_REMOVE = """
import sys, ray
from ray import serve
from warmroot.deploy.app import APP_NAME
ray.init(address=sys.argv[1], log_to_driver=False)
serve.delete(APP_NAME)
"""


def why_no_site() -> str | None:
    """Why there can be none here; None if there can."""
    if which("redis-server") is None:
        return "redis-server is not installed"
    return why_no_hosts() or (None if Path("/dev/net/tun").exists() else "there is no /dev/net/tun")


@dataclass(frozen=True, slots=True)
class Size:
    """How many of what."""

    model: str = "smollm2"
    solo: int = 2
    """Replicas of one process."""
    gangs: int = 1
    """Replicas of two ranks."""
    ingresses: int = 2

    @property
    def replicas(self) -> int:
        return self.solo + self.gangs

    def processes(self) -> dict[str, int]:
        """How many of each role there are when nothing is amiss."""
        return {"replica": self.replicas, "rank": 2 * self.gangs, "ingress": self.ingresses, "controller": 1, "gcs": 1}


@dataclass(frozen=True, slots=True)
class Found:
    """A process of the site."""

    role: str
    host: Host
    process: HostProcess

    @property
    def name(self) -> str:
        """For people."""
        return f"{self.role} {self.process.inner_pid} on {self.host.name}"

    def num_descriptors(self) -> int | None:
        """Open files and sockets; None if it has ended."""
        with suppress(OSError):
            return len(os.listdir(f"/proc/{self.process.pid}/fd"))
        return None


class Site:
    """The running cluster, and what can be seen of it from outside."""

    def __init__(self, lan: Lan, size: Size) -> None:
        """The first host is the head, the last one Redis's; those between serve."""
        self.lan = lan
        self.size = size
        self.head, *self.workers, self.store = lan.hosts
        self.urls = [f"http://{host.address}:{PORT}" for host in self.workers]
        self.hit_links: set[str] = set()
        """Names of hosts whose link is bad now."""
        self.headers = {"authorization": f"Bearer {ADMIN_KEY}"}

    def find(self, *roles: str) -> list[Found]:
        """Living processes with these parts, in a fixed order."""
        words = {role: ROLES[role] for role in roles or ROLES}
        found: list[Found] = []
        for host in self.lan.hosts:
            for process in host.processes(*words.values()):
                role = next((r for r, word in words.items() if word in process.command.split(" -")[0]), None)
                if role is not None:
                    found.append(Found(role, host, process))
        return sorted(found, key=lambda one: (one.role, one.host.name, one.process.inner_pid))

    def state(self, url: str | None = None) -> dict[str, Any] | None:
        """What an ingress knows, by the first door that answers, or by this one; None if none does."""
        for door in [url] if url else self.urls:
            with suppress(httpx.HTTPError, ValueError):
                response = httpx.get(f"{door}/admin/state", headers=self.headers, timeout=3.0, trust_env=False)
                if response.status_code == 200:
                    return response.json()
        return None

    def what_is_amiss(self) -> str:
        """What is missing for the site to be whole; empty: nothing."""
        found = self.find()
        counts = {role: sum(one.role == role for one in found) for role in ROLES}
        for role, count in self.size.processes().items():
            if counts[role] != count:
                return f"{counts[role]} of {count} {role} processes"
        states = {url: self.state(url) for url in self.urls}
        closed = [url for url, state in states.items() if state is None]
        if closed:
            return f"{' and '.join(closed)} does not answer"
        missing = (_missing(state, self.size.replicas, found) for state in states.values() if state is not None)
        return next(filter(None, missing), "")

    def wait_whole(self, deadline_s: float) -> None:
        """Until nothing is amiss. Raises AssertionError."""
        wait_until(lambda: not self.what_is_amiss(), deadline_s, self.what_is_amiss)

    def busy(self) -> str:
        """What replicas still hold, as every door tells it; empty: nothing."""
        for url in self.urls:
            state = self.state(url)
            if state is None:
                return f"{url} does not answer"
            for replica in state["replicas"]:
                held = {key: replica[key] for key in ("running", "waiting", "kv_used_blocks") if replica[key]}
                if held:
                    return f"{replica['replica']}: {held}"
        return ""

    def audited(self) -> str:
        """What the audit logs of all ingresses hold."""
        logs = [Path(f"/proc/{host.init}/root{AUDIT_LOG}") for host in self.lan.hosts]
        return "".join(log.read_text() for log in logs if log.exists())

    def remove(self) -> None:
        """Take the application down, as an operator does."""
        command = [sys.executable, "-c", _REMOVE, f"{self.head.address}:{GCS_PORT}"]
        self.head.start(command, self.head.environment()).wait(120.0)

    def keep_logs(self, folder: Path) -> None:
        """Copy there what the hosts' commands and all of Ray's processes have said."""
        for host in self.lan.hosts:
            (folder / host.name).mkdir(parents=True, exist_ok=True)
            for log in host.logs:
                copy(log, folder / host.name)
            inner = Path(f"/proc/{host.init}/root{host.scratch}")  # a disk that only the host sees
            for session in inner.glob("session_*/logs"):
                if not session.parent.is_symlink():
                    copytree(session, folder / host.name / "ray", dirs_exist_ok=True, symlinks=True)

    @property
    def logs(self) -> str:
        """What the hosts' commands said last."""
        return "\n".join(f"{log}: {log.read_text()[-1500:]}" for host in self.lan.hosts for log in host.logs)


def _missing(state: Mapping[str, Any], num_replicas: int, found: Sequence[Found]) -> str:
    """What an ingress misses, or takes for alive that is not."""
    ready = [replica for replica in state["replicas"] if replica["state"] == "ready"]
    if len(ready) != num_replicas or len(state["replicas"]) != num_replicas:
        return f"{len(ready)} of {num_replicas} replicas are ready, {len(state['replicas'])} known"
    alive = {(one.host.name, one.process.inner_pid) for one in found if one.role in ("replica", "rank")}
    pids = {pid for _, pid in alive}  # numbers are each host's own, and a replica without ranks tells no host
    for replica in ready:
        if replica["pid"] not in pids or {(rank["host"], rank["pid"]) for rank in replica["ranks"]} - alive:
            return f"replica {replica['replica']} has ended"
    return state["metadata_store"]["fault"]


def send(found: Found, number: signal.Signals) -> None:
    """A signal; whoever has ended meanwhile gets none."""
    with suppress(ProcessLookupError):
        os.kill(found.process.pid, number)


@contextmanager
def running_site(size: Size) -> Iterator[Site]:
    """Start hosts, Redis, Ray and the application, and end them all."""
    with new_lan("wrc") as lan:
        for _ in range(4):
            _limit_disk(lan.add_host())
        site = Site(lan, size)
        _start_redis(site.store, REDIS_PORT, site.store.address)
        _start_redis(site.head, GCS_REDIS_PORT, "127.0.0.1", keeps=True)
        _start_ray(site)
        _deploy(site)
        began = time.monotonic()
        while amiss := site.what_is_amiss():
            assert time.monotonic() - began < START_S, f"{amiss}\n{site.logs}"
            time.sleep(0.5)
        yield site


def _limit_disk(host: Host) -> None:
    """Logs and temporary files of the host are on a small disk of their own."""
    mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(host.scratch)]
    for command in (mount, ["mount", "--bind", str(host.scratch), str(Path(AUDIT_LOG).parent)]):
        assert host.start(command, os.environ).wait(20.0) == 0, host.logs[-1].read_text()


def _start_redis(host: Host, port: int, address: str, *, keeps: bool = False) -> None:
    options = ["--port", str(port), "--bind", address, "--protected-mode", "no", "--save", "", "--appendonly", "no"]
    if keeps:  # what the GCS has written must be there when it comes back
        options[-1] = "yes"
        options += ["--dir", str(host.scratch)]
    host.start_forever(["redis-server", *options], os.environ)


def _start_ray(site: Site) -> None:
    patient = {"RAY_gcs_rpc_server_reconnect_timeout_s": "120"}
    store = {"RAY_REDIS_ADDRESS": f"127.0.0.1:{GCS_REDIS_PORT}", "RAY_external_storage_namespace": "chaos"}
    site.head.start_ray(site.head, num_cpus=0, **patient, **store)
    site.head.wait_ray(START_S)
    for host in site.workers:
        host.start_ray(site.head, num_cpus=CPUS_EACH, **patient)
    for host in site.workers:
        host.wait_ray(START_S)


def _deploy(site: Site) -> None:
    command = [sys.executable, "-c", _DEPLOY, f"{site.head.address}:{GCS_PORT}", str(PORT), json.dumps(groups(site))]
    process = site.head.start(command, site.head.environment(), stdout=subprocess.DEVNULL)
    assert process.wait(START_S) == 0, site.logs


def groups(site: Site) -> list[Mapping[str, Any]]:
    """Configuration keys of each group of replicas."""
    size = site.size
    common = {
        "model": size.model,
        "dtype": "float32",
        "quantization": "none",
        "threads_per_replica": 1,
        "num_kv_blocks": 400,
        "max_num_seqs": 8,
        "max_model_len": 1024,
        "step_timeout": STEP_TIMEOUT_S,
        "num_ingress": size.ingresses,
        "audit_log": AUDIT_LOG,
        "tenant_api_key": [f"tenant{number}={key}" for number, key in enumerate(KEYS)],
        "admin_api_key": [ADMIN_KEY],
        "metadata_store": f"redis://{site.store.address}:{REDIS_PORT}/0?prefix=chaos",
    }
    solo = common | {"num_replicas": size.solo}
    gangs = common | {"num_replicas": size.gangs, "tensor_parallel_size": 2}
    return [solo, gangs] if size.gangs else [solo]
