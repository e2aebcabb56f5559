"""``warmroot serve`` over hosts, as its operator and its clients see it."""

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from .cluster_harness import wait_until
from .hosts_harness import GCS_PORT, Host, HostProcess, Lan

PORT = 8000
MODEL = "small"
START_S = 400.0
"""Nodes, replicas and ranks load torch, on a machine that does much else."""
_LOOK = """
import json, sys, ray
ray.init(address=sys.argv[1], log_to_driver=False)
states = [group["state"] for group in ray.util.placement_group_table().values()]
nodes = sum(node["Alive"] for node in ray.nodes())
print(json.dumps({"nodes": nodes, "groups": [state for state in states if state != "REMOVED"]}))
"""


@dataclass(frozen=True)
class Gang:
    """A replica and the hosts of its ranks."""

    replica: str
    epoch: int
    pid: int
    ranks: tuple[tuple[Host, int], ...]
    """Host and the process id there, by rank."""

    @property
    def hosts(self) -> list[str]:
        """Names of the hosts by stage."""
        return sorted({host.name for host, _ in self.ranks})


class Served:
    """The running application."""

    def __init__(self, lan: Lan) -> None:
        self.lan = lan
        self.url = f"http://{lan.hosts[0].address}:{PORT}"

    def gangs(self) -> list[Gang]:
        """Of the replicas that are ready, as the ingress knows them; none while it is out of reach."""
        return [self._gang(replica) for replica in self._replicas() if replica["state"] == "ready"]

    def _replicas(self) -> list[dict[str, Any]]:
        try:
            return httpx.get(f"{self.url}/admin/state", timeout=10.0, trust_env=False).json()["replicas"]
        except (httpx.HTTPError, ValueError, KeyError):
            return []

    def _gang(self, replica: dict[str, Any]) -> Gang:
        hosts = {host.name: host for host in self.lan.hosts}
        ranks = tuple((hosts[rank["host"]], rank["pid"]) for rank in replica["ranks"])
        return Gang(replica["replica"], replica["epoch"], replica["pid"], ranks)

    def wait_busy(self, gang: Gang) -> None:
        """Until it computes for somebody."""
        wait_until(lambda: any(r["replica"] == gang.replica and r["running"] for r in self._replicas()), 60.0)

    def wait_for(self, num_replicas: int, gone: str = "") -> list[Gang]:
        """Until so many are ready, none of them the one that has ``gone``."""
        found: list[Gang] = []

        def there() -> bool:
            found[:] = self.gangs()
            return len(found) == num_replicas and gone not in {gang.replica for gang in found}

        wait_until(there, START_S, lambda: found)
        return found

    def rank_processes(self) -> set[tuple[str, int]]:
        """Host and process id there of every rank that exists."""
        return {(host.name, p.inner_pid) for host in self.lan.hosts for p in host.processes("ray::ShardWorker")}

    def leader(self, gang: Gang) -> HostProcess:
        """The replica's own process, which lives where its first stage does."""
        return gang.ranks[0][0].process(gang.pid)

    def starting(self) -> list[HostProcess]:
        """Leaders of gangs that are not ready yet but have processes of ranks."""
        gangs = self.gangs()
        leaders = {(gang.ranks[0][0].name, gang.pid) for gang in gangs}
        ranks = self.rank_processes() - {(host.name, pid) for gang in gangs for host, pid in gang.ranks}
        found = [(host.name, p) for host in self.lan.hosts for p in host.processes("ServeReplica:warmroot:Replica")]
        return [p for name, p in found if (name, p.inner_pid) not in leaders] if gangs and ranks else []

    def answers_at(self, host: Host) -> bool:
        """Whether the endpoint of this host does."""
        try:
            return httpx.get(f"http://{host.address}:{PORT}/readyz", timeout=10.0, trust_env=False).status_code == 200
        except httpx.TransportError:
            return False

    def ray_state(self) -> dict[str, Any]:
        """How many ``nodes`` live, and the states of the placement ``groups`` that exist, as Ray sees them."""
        head = self.lan.hosts[0]
        arguments = [sys.executable, "-c", _LOOK, f"{head.address}:{GCS_PORT}"]
        process = head.start(arguments, head.environment(), stdout=subprocess.PIPE)
        lines = process.communicate(timeout=120.0)[0].splitlines()
        return json.loads(next(line for line in lines if line.startswith("{")))  # Ray talks too


@contextmanager
def serve_over(lan: Lan, model: Path, flags: Sequence[str]) -> Iterator[Served]:
    """Run the command on the head, until it answers with two replicas."""
    head = lan.hosts[0]
    command = [
        *(str(Path(sys.executable).with_name("warmroot")), "serve", str(model), "--served-model-name", MODEL),
        *("--ray-address", f"{head.address}:{GCS_PORT}", "--host", "0.0.0.0", "--port", str(PORT), *flags),
    ]
    served = Served(lan)
    wait_until(lambda: served.ray_state()["nodes"] == len(lan.hosts), START_S)
    process = head.start(command, head.environment())
    wait_until(lambda: process.poll() is not None or len(served.gangs()) == 2, START_S)
    assert process.poll() is None, head.logs[-1].read_text()[-4000:]
    yield served
