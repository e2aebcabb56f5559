"""Hosts on one machine: each with an address, a process table, a name and a /dev/shm of its own, on a switch.

All of it hangs on the test's process: if that ends, however it ends, the kernel takes down hosts, links and processes.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from warmroot.deploy.local_ray import SETTINGS, own_places

from .cluster_harness import wait_until

DETECTION = {
    # A host that does not answer for three seconds is dead; by default it takes half a minute.
    "RAY_health_check_initial_delay_ms": "5000",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "1000",
    "RAY_health_check_failure_threshold": "3",
    # HAProxy gives an ingress up that is out of reach, and those who wait for it: otherwise they wait for minutes.
    # Serve has no variable for that; what it has for the interval is copied into HAProxy's configuration as it stands.
    "RAY_SERVE_HAPROXY_TIMEOUT_CONNECT_S": "1",
    "RAY_SERVE_HAPROXY_HEALTH_CHECK_INTER": "1s on-marked-down shutdown-sessions",
    "RAY_SERVE_HAPROXY_HEALTH_CHECK_FALL": "3",
}
"""What a cluster of several hosts sets on each of them to notice a loss soon."""

GCS_PORT = 6379
_BIN = Path(sys.executable).parent
# Ends with its standard input, and with it all that runs in its process table. The shell also reaps orphans.
_INIT = """
mount -t tmpfs tmpfs /dev/shm; hostname "$0"; ip link set lo up; echo up
exec 3<&0; cat <&3 >/dev/null & wait $!
"""
# A supervisor, as systemd or the kubelet is one.
_FOREVER = """
while :; do "$@"; echo "$0 has ended with $?"; sleep 1; done
"""


def why_no_hosts() -> str | None:
    """Why hosts cannot be made here; None if they can."""
    if os.geteuid() != 0:
        return "hosts are network namespaces, which only root may make"
    missing = [tool for tool in ("ip", "unshare", "nsenter") if shutil.which(tool) is None]
    if missing:
        return f"hosts need {' and '.join(missing)} (Debian: iproute2, util-linux)"
    tried = subprocess.run(
        ["unshare", "--net", "--uts", "--pid", "--fork", "--mount-proc", "true"], capture_output=True, check=False
    )
    return f"no namespaces here: {tried.stderr.decode().strip()}" if tried.returncode else None


@dataclass(frozen=True)
class HostProcess:
    """A process of a host."""

    pid: int
    """As the test sees it."""
    inner_pid: int
    """As the host sees it."""
    command: str


@dataclass(frozen=True)
class Host:
    """A machine of its own, as far as its processes can tell."""

    name: str
    address: str
    scratch: Path
    init: int
    """The test's id of the host's first process."""
    logs: list[Path] = field(default_factory=list)

    def start(self, command: Sequence[str], environment: Mapping[str, str], **options) -> "subprocess.Popen[str]":
        """Run a command there, with the test's folders. Its output goes to a log unless ``options`` say else."""
        log = self.scratch / f"{len(self.logs)}-{Path(command[0]).name}.log"
        self.logs.append(log)
        with log.open("w") as file:
            enter = ["nsenter", f"--target={self.init}", "--net", "--uts", "--pid", "--mount", f"--wd={os.getcwd()}"]
            streams = {"stdin": subprocess.DEVNULL, "stdout": file, "stderr": file} | options
            return subprocess.Popen([*enter, *command], env=dict(environment), text=True, **streams)

    def environment(self) -> dict[str, str]:
        """What Ray's processes need to know here."""
        return {**os.environ, **SETTINGS, **DETECTION, **own_places(self.scratch), "RAY_enable_worker_prestart": "0"}

    def start_ray(self, head: "Host", *, num_cpus: int, **variables: str) -> None:
        """Run a node of Ray for ever. ``head`` is this host for the first one; ``variables`` are its environment's."""
        own = ["--head", f"--port={GCS_PORT}", "--include-dashboard=false"]
        command = [
            *(own if head is self else [f"--address={head.address}:{GCS_PORT}"]),
            f"--node-ip-address={self.address}",
            f"--num-cpus={num_cpus}",
            "--object-store-memory=80000000",
            f"--temp-dir={self.scratch}",
            *("--disable-usage-stats", "--no-monitor", "--include-log-monitor=false"),  # nobody would look
        ]
        self.start_forever([str(_BIN / "ray"), "start", "--block", *command], self.environment() | variables)

    def wait_ray(self, deadline_s: float = 120.0) -> None:
        """Until the node is up."""
        log = self.logs[-1]
        wait_until(lambda: "Ray runtime started" in log.read_text(), deadline_s, log.read_text)

    def start_forever(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        """Run a command there, and again whenever it ends."""
        self.start(["sh", "-c", _FOREVER, Path(command[0]).name, *command], environment)

    def processes(self, *words: str) -> list[HostProcess]:
        """Those alive, with one of the words in the command if there are any."""
        mine = os.stat(f"/proc/{self.init}/ns/pid").st_ino
        found: list[HostProcess] = []
        for folder in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):  # it ended meanwhile
                if os.stat(folder / "ns/pid").st_ino == mine:
                    command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
                    status = dict(line.split(":", 1) for line in (folder / "status").read_text().splitlines())
                    alive = "Z" not in status["State"] and command
                    if alive and (not words or any(word in command for word in words)):
                        found.append(HostProcess(int(folder.name), int(status["NSpid"].split()[-1]), command))
        return found

    def process(self, inner_pid: int) -> HostProcess:
        """The one that the host knows by this id."""
        return next(process for process in self.processes() if process.inner_pid == inner_pid)

    def raylet(self) -> HostProcess:
        """The node's Ray daemon."""
        return next(p for p in self.processes("raylet/raylet") if "raylet/raylet" in p.command.split()[0])


class Lan:
    """Hosts at the ports of a switch, which the test can reach too."""

    def __init__(self, scratch: Path, stack: ExitStack) -> None:
        self.hosts: list[Host] = []
        self._scratch = scratch
        self._stack = stack
        self._switch = self._hold(["unshare", "--net", "sh", "-c", "echo up; exec cat >/dev/null"])
        self.at_switch("ip", "link", "add", "lan", "type", "bridge")
        self.at_switch("ip", "link", "set", "lan", "up")
        # The links of an earlier switch of this process go a while after it.
        self._subnet, uplink = f"10.88.{self._switch % 250}", f"wr{self._switch}"
        self._plug(uplink, "uplink", os.getpid())
        _run("ip", "address", "add", f"{self._subnet}.254/24", "dev", uplink)
        _run("ip", "link", "set", uplink, "up")

    def add_host(self) -> Host:
        """A further host, without anything that runs."""
        number = len(self.hosts) + 1
        name = f"host{number}"
        isolation = ["--net", "--uts", "--pid", "--fork", "--mount-proc", "--kill-child"]
        outer = self._hold(["unshare", *isolation, "sh", "-c", _INIT, name])
        init = int(Path(f"/proc/{outer}/task/{outer}/children").read_text().split()[0])
        host = Host(name, f"{self._subnet}.{number}", self._scratch / name, init)
        host.scratch.mkdir()
        self._plug("eth0", name, init)
        # Without a default route programs do not find out the host's address.
        route = f"route add default via {self._subnet}.254"
        for command in (f"address add {host.address}/24 dev eth0", "link set eth0 up", route):
            _run("nsenter", f"--target={init}", "--net", "ip", *command.split())
        self.hosts.append(host)
        return host

    def cut(self, host: Host) -> None:
        """Nothing reaches the host nor leaves it any more; nobody is told."""
        self.at_switch("ip", "link", "set", host.name, "nomaster")

    def mend(self, host: Host) -> None:
        """Undo ``cut``."""
        self.at_switch("ip", "link", "set", host.name, "master", "lan")

    def _plug(self, interface: str, port: str, pid: int) -> None:
        """A cable from ``port`` of the switch to the namespace of a process."""
        self.at_switch("ip", "link", "add", port, "type", "veth", "peer", "name", interface, "netns", str(pid))
        self.at_switch("ip", "link", "set", port, "master", "lan", "up")

    def at_switch(self, *command: str) -> None:
        """Run a command where the hosts' ports are."""
        # The test's process table stays: interfaces are moved to processes by their ids.
        _run("nsenter", f"--target={self._switch}", "--net", *command)

    def start_at_switch(self, command: Sequence[str]) -> "subprocess.Popen[str]":
        """Start a process there that says ``up`` and ends with its standard input."""
        return self._started(["nsenter", f"--target={self._switch}", "--net", *command])

    def _hold(self, command: list[str]) -> int:
        """Start a process that lives until the stack closes, or this process ends."""
        return self._started(command).pid

    def _started(self, command: list[str]) -> "subprocess.Popen[str]":
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert process.stdin is not None and process.stdout is not None
        self._stack.callback(process.wait)
        self._stack.enter_context(process.stdin)
        assert process.stdout.readline() == "up\n"
        return process


def _run(*command: str) -> None:
    done = subprocess.run(command, text=True, capture_output=True, check=False)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"


@contextmanager
def new_lan(prefix: str) -> Iterator[Lan]:
    """A switch without hosts yet; ``prefix`` begins the name of the folder that is theirs until the end."""
    # Ray's sockets live there: their paths must be short.
    scratch = Path(tempfile.mkdtemp(prefix=prefix, dir="/tmp"))
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, scratch, ignore_errors=True)
        yield Lan(scratch, stack)


@contextmanager
def ray_hosts(num_cpus: Sequence[int]) -> Iterator[Lan]:
    """A Ray cluster with a host for each number; the first is the head."""
    with new_lan("wrh") as lan:
        for amount in num_cpus:
            lan.add_host().start_ray(lan.hosts[0], num_cpus=amount)
            if len(lan.hosts) == 1:
                wait_until(lambda: bool(lan.hosts[0].processes("gcs_server")), 120.0)
        for host in lan.hosts:
            wait_until(lambda host=host: bool(host.processes("raylet/raylet")), 120.0, host.logs[0].read_text)
        yield lan
