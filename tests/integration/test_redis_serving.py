"""``warmroot serve`` with Redis: two replicas and two ingresses as real processes, and Redis killed under load."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from redis_server import RedisServer, needs_redis

from warmroot.deploy.local_ray import free_port

from .cluster_harness import wait_until

pytestmark = [needs_redis, pytest.mark.cluster, pytest.mark.model, pytest.mark.slow]

SECRET = "s3cret-of-redis"
FLAGS = (
    "--num-replicas 2 --num-ingress 2 --threads-per-replica 1 --num-kv-blocks 80 --max-num-seqs 8 --max-model-len 1024"
)


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path, f"requirepass {SECRET}").start()
    yield server
    server.kill()


@pytest.fixture
def served(redis: RedisServer, tmp_path: Path) -> Iterator[tuple[httpx.Client, "subprocess.Popen[bytes]", Path]]:
    port, log = free_port(), tmp_path / "serve.log"
    url = f"{redis.url}?prefix=e2e"
    warmroot = str(Path(sys.executable).with_name("warmroot"))
    command = [warmroot, "serve", "smollm2", "--port", str(port), *FLAGS.split()]
    environ = {**os.environ, "WARMROOT_REDIS_PASSWORD": SECRET}
    with log.open("wb") as out:
        process = subprocess.Popen([*command, "--metadata-store", url], stdout=out, stderr=out, env=environ)
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=120, trust_env=False) as client:
        try:
            wait_until(lambda: process.poll() is not None or "warmroot status" in log.read_text(), 200, log.read_text)
            assert process.poll() is None, log.read_text()
            yield client, process, log
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(90)


class Load:
    """Asks all the time; ``faults`` are answers other than 200."""

    def __init__(self, client: httpx.Client) -> None:
        self.served, self.faults = 0, list[str]()
        self._client, self._ends = client, threading.Event()
        self._thread = threading.Thread(target=self._ask)
        self._thread.start()

    def _ask(self) -> None:
        while not self._ends.is_set():
            body = {"model": "smollm2", "prompt": f"{self.served % 5} green bottles " * 20, "max_tokens": 2}
            response = self._client.post("/v1/completions", json=body)
            self.served += 1
            if response.status_code != 200:
                self.faults.append(response.text)

    def end(self) -> None:
        self._ends.set()
        self._thread.join()


def store(client: httpx.Client) -> dict[str, object]:
    return client.get("/admin/state").json()["metadata_store"]


def test_a_cluster_outlives_its_redis(redis: RedisServer, served: tuple[httpx.Client, "subprocess.Popen[bytes]", Path]):
    client, process, log = served
    assert store(client)["store"] == f"{redis.url}/0"
    load = Load(client)
    try:
        wait_until(lambda: load.served >= 10)
        redis.kill()
        before = load.served
        wait_until(lambda: "routing on what is known" in log.read_text() or store(client)["fault"] != "", 60)
        time.sleep(6.0)  # longer than a lease
        wait_until(lambda: load.served >= before + 10, 120)
        redis.start()
        # Either ingress may answer.
        wait_until(lambda: all(not store(client)["fault"] for _ in range(8)), 30)
        wait_until(lambda: len(redis.cli("--no-auth-warning", "keys", "{e2e}:replica:*", secret=SECRET).split()) == 2)
        before = load.served
        wait_until(lambda: load.served >= before + 10, 120)
    finally:
        load.end()
    assert load.faults == []
    replicas = client.get("/admin/state").json()["replicas"]
    assert sorted(replica["state"] for replica in replicas) == ["ready", "ready"]
    shown = subprocess.run(["ps", "axww", "-o", "args"], capture_output=True, text=True, check=True).stdout
    assert SECRET not in shown
    assert SECRET not in log.read_text()
    process.send_signal(signal.SIGINT)
    process.wait(90)
    keys = set(redis.cli("keys", "*", secret=SECRET).split())
    assert keys <= {"{e2e}:stream:", "{e2e}:check"}  # news, which fade by themselves
