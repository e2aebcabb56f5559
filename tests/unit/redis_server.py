"""A real redis-server of one's own: on a free port of loopback, in a temporary folder."""

import os
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path

import pytest

BINARY = shutil.which("redis-server")
needs_redis = pytest.mark.skipif(BINARY is None, reason="redis-server is not installed")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class RedisServer:
    """``options`` are lines of its configuration. Start it again after ``kill`` or ``stop`` on the same port."""

    def __init__(self, folder: Path, *options: str, port: int | None = None, arguments: tuple[str, ...] = ()) -> None:
        self.port = port or free_port()
        self.folder = folder / f"redis-{self.port}"
        self.folder.mkdir(parents=True)
        self.process: subprocess.Popen[bytes] | None = None
        self._arguments = arguments
        plain = [] if "--sentinel" in arguments else ['save ""']
        lines = [f"port {self.port}", "bind 127.0.0.1", f"dir {self.folder}", *plain, *options]
        self.config = self.folder / "redis.conf"
        self.config.write_text("\n".join(lines) + "\n")

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}"

    def start(self) -> "RedisServer":
        assert BINARY is not None
        with (self.folder / "log").open("ab") as log:
            command = [BINARY, str(self.config), *self._arguments]
            self.process = subprocess.Popen(command, stdout=log, stderr=log)
        self.wait()
        return self

    def wait(self) -> None:
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            assert self.process is not None
            assert self.process.poll() is None, (self.folder / "log").read_text()
            port = self.port
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    return
            time.sleep(0.02)
        raise AssertionError("redis-server does not listen")

    def cli(self, *words: str, secret: str | None = None) -> str:
        """What redis-cli says."""
        environ = {**os.environ, **({"REDISCLI_AUTH": secret} if secret else {})}
        command = ["redis-cli", "-p", str(self.port), *words]
        return subprocess.run(command, capture_output=True, text=True, check=True, env=environ).stdout.strip()

    def kill(self) -> None:
        """As if its machine lost power."""
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        self._end(signal.SIGTERM)

    def pause(self) -> None:
        """It answers nothing, but its connections stand."""
        assert self.process is not None
        self.process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGCONT)

    def _end(self, number: signal.Signals) -> None:
        if self.process is not None:
            self.process.send_signal(number)
            self.process.wait(20)
            self.process = None
