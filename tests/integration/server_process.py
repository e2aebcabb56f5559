"""``warmroot serve`` as a process of its own, and the processes and sockets below it."""

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import httpx

from warmroot.deploy.local_ray import free_port

from .cluster_harness import Process, descendants, processes, wait_until

PROGRAM = "import sys; from warmroot.deploy.cli import main; sys.exit(main(sys.argv[1:]))"
SMALL = ("--threads-per-replica", "1", "--num-kv-blocks", "80", "--max-model-len", "512")


class ServerProcess:
    """One server in a process group of its own."""

    def __init__(self, folder: Path, *flags: str, scheme: str = "http", **popen: object) -> None:
        self.port = free_port()
        self.url = f"{scheme}://127.0.0.1:{self.port}"
        self.log = folder / "stderr"
        self.family: set[Process] = set()
        command = [sys.executable, "-c", PROGRAM, "serve", "smollm2", "--port", str(self.port), *SMALL, *flags]
        with self.log.open("wb") as log:
            options = {"stdout": subprocess.DEVNULL, "stderr": log, "start_new_session": True, **popen}
            self.process = subprocess.Popen(command, **options)  # type: ignore[call-overload]

    def wait_ready(self, verify: object = True) -> "ServerProcess":
        """Until it answers, and has said so."""

        def answers() -> bool:
            assert self.process.poll() is None, self.log.read_text()
            with suppress(httpx.TransportError):
                return httpx.get(f"{self.url}/health", verify=verify, trust_env=False).status_code == 200
            return False

        wait_until(answers, 120, self.log.read_text)
        wait_until(lambda: "is served at" in self.log.read_text(), 30, self.log.read_text)
        self.look()
        return self

    def look(self) -> set[Process]:
        """Remember, and return, who is below it."""
        self.family |= descendants(self.process.pid)
        return self.family

    def pids(self, name: str) -> list[int]:
        """Of the processes below it whose command line has ``name``."""
        found = [pid for pid, _ in descendants(self.process.pid) if name in command_line(pid)]
        return sorted(found)

    def signal_group(self, number: int) -> None:
        """As a terminal or ``kill -- -PGID`` does."""
        os.killpg(self.process.pid, number)

    def ended(self, deadline_s: float) -> int:
        """Its exit code, once it and all below it are gone."""
        self.look()
        code = self.process.wait(deadline_s)
        wait_until(lambda: not self.family & processes(), 15, self.left)
        wait_until(lambda: not list(Path("/tmp").glob(f"wr-{self.process.pid}-*")), 5)
        return code

    def left(self) -> list[str]:
        """Who has outlived it."""
        return [command_line(pid) for pid, _ in self.family & processes()]

    def kill(self) -> None:
        """For the end of a test that failed."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
            self.process.wait()

    def complete(self, **options: object) -> httpx.Response:
        """Three greedy tokens."""
        body = {"model": "smollm2", "prompt": "One two three", "max_tokens": 3, "temperature": 0}
        return httpx.post(f"{self.url}/v1/completions", json=body, timeout=30, trust_env=False, **options)  # type: ignore[arg-type]


def command_line(pid: int) -> str:
    """Empty once it is gone."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    return ""


def listening(pids: set[int]) -> set[str]:
    """``address:port`` of every TCP socket on which one of the processes listens."""
    inodes: set[str] = set()
    for pid in pids:
        with suppress(OSError):
            for entry in os.scandir(f"/proc/{pid}/fd"):
                with suppress(OSError):
                    inodes.add(os.readlink(entry.path).removeprefix("socket:[").removesuffix("]"))
    found: set[str] = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            _, local, _, state, *rest = line.split()
            if state == "0A" and rest[5] in inodes:
                address, port = local.split(":")
                found.add(f"{_address(address)}:{int(port, 16)}")
    return found


def _address(text: str) -> str:
    """The kernel's hexadecimal words, each in the machine's byte order, as an IPv4 address where it is one."""
    words = [bytes.fromhex(text[i : i + 8])[::-1] for i in range(0, len(text), 8)]
    data = b"".join(words)
    mapped = data[:12] == b"\0" * 10 + b"\xff\xff"
    return ".".join(map(str, data[-4:])) if len(data) == 4 or mapped else data.hex()
