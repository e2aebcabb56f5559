"""Deployed again under load, with other configuration, then other weights: no request fails, each is of one version."""

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from io import StringIO
from pathlib import Path
from typing import Any

import httpx
import pytest
from rich.console import Console

from warmroot.cluster.config import WarmrootConfig
from warmroot.deploy.local_ray import free_port
from warmroot.deploy.serve_config import serve_config
from warmroot.deploy.submit import submit

from .cluster_harness import wait_until
from .other_weights import other_weights

pytestmark = [pytest.mark.slow, pytest.mark.cluster, pytest.mark.model]

SHORT = {"model": "m", "prompt": "The capital of France is", "temperature": 0, "max_tokens": 30, "ignore_eos": True}
LONG = SHORT | {"prompt": "Once upon a time", "max_tokens": 400}
KEYS = {
    "served_model_name": ["m"],
    "num_replicas": 2,
    "num_ingress": 2,
    "threads_per_replica": 1,
    "num_kv_blocks": 200,
    "max_model_len": 512,
    "shutdown_grace": 60.0,
    "host": "127.0.0.1",
}


@dataclass
class Head:
    dashboard: str
    port: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def deploy(self, model: str, **keys: Any) -> None:
        config = serve_config(WarmrootConfig.of(model, port=self.port, **{**KEYS, **keys}))
        submit(config, self.dashboard, console=Console(file=StringIO()))


@pytest.fixture(scope="module")
def head() -> Iterator[Head]:
    dashboard, port = free_port(), free_port()
    program = str(Path(__file__).with_name("serve_head.py"))
    process = subprocess.Popen(
        [sys.executable, program, str(dashboard)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None and process.stdin is not None
        assert process.stdout.readline() == "ready\n"
        yield Head(f"http://127.0.0.1:{dashboard}", port)
        process.stdin.close()
        process.wait(60)
    finally:
        process.kill()


@dataclass
class Traffic:
    """Clients that each send one request after the other, half of them as streams, some long ones."""

    url: str
    answers: list[tuple[str, str, tuple[str, ...]]] = field(default_factory=list)
    """Prompt, text and versions."""
    errors: list[str] = field(default_factory=list)

    def __enter__(self) -> "Traffic":
        self._ended = threading.Event()
        bodies = [SHORT, SHORT | {"stream": True}, SHORT | {"stream": True}, LONG | {"stream": True}]
        self._threads = [threading.Thread(target=self._run, args=(body,)) for body in bodies]
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        for thread in self._threads:
            thread.join(120)

    def _run(self, body: dict[str, Any]) -> None:
        with httpx.Client(base_url=self.url, timeout=120, trust_env=False) as client:
            while not self._ended.is_set():
                try:
                    text, usage = (streamed if body.get("stream") else whole)(client, body)
                except Exception as error:
                    self.errors.append(repr(error))
                    continue
                self.answers.append((body["prompt"], text, tuple(usage["weights_versions"])))


def whole(client: httpx.Client, body: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    response = client.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    answer = response.json()
    return answer["choices"][0]["text"], answer["usage"]


def streamed(client: httpx.Client, body: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    text, usage, last = "", None, ""
    body = body | {"stream_options": {"include_usage": True}}
    with client.stream("POST", "/v1/completions", json=body) as response:
        assert response.status_code == 200, response.read()
        for line in response.iter_lines():
            if not line.startswith("data: "):
                continue
            last = line.removeprefix("data: ")
            if last != "[DONE]":
                chunk = json.loads(last)
                assert "error" not in chunk, chunk
                usage = chunk.get("usage") or usage
                text += "".join(choice["text"] for choice in chunk["choices"])
    assert last == "[DONE]", f"the stream broke off after {len(text)} characters"
    assert usage is not None and usage["completion_tokens"] == body["max_tokens"]
    return text, usage


def references(url: str) -> dict[str, str]:
    with httpx.Client(base_url=url, timeout=120, trust_env=False) as client:
        return {body["prompt"]: whole(client, body)[0] for body in (SHORT, LONG)}


def versions(url: str) -> list[str]:
    return httpx.get(f"{url}/v1/models", trust_env=False).json()["data"][0]["weights_versions"]


def test_deployed_again_under_load(head: Head, tmp_path: Path):
    head.deploy("smollm2")
    old, [own] = references(head.url), versions(head.url)
    with Traffic(head.url) as traffic:
        wait_until(lambda: len(traffic.answers) >= 4, 60, lambda: traffic)
        head.deploy("smollm2", max_num_seqs=16)
        count = len(traffic.answers)
        wait_until(lambda: len(traffic.answers) >= count + 8, 60, lambda: traffic)
    assert not traffic.errors, traffic.errors
    assert {versions for _, _, versions in traffic.answers} == {(own,)}
    assert all(text == old[prompt] for prompt, text, _ in traffic.answers)

    with Traffic(head.url) as traffic:
        wait_until(lambda: len(traffic.answers) >= 4, 60, lambda: traffic)
        head.deploy(str(other_weights(tmp_path)), max_num_seqs=16)
        wait_until(lambda: own not in versions(head.url), 60, lambda: versions(head.url))
        count = len(traffic.answers)
        wait_until(lambda: len(traffic.answers) >= count + 8, 60, lambda: traffic)
    assert not traffic.errors, traffic.errors
    [new] = versions(head.url)
    answers = {(own,): old, (new,): references(head.url)}
    assert answers[own,] != answers[new,]
    mixed = [told for _, _, told in traffic.answers if told not in answers]
    assert not mixed, mixed
    assert all(text == answers[told][prompt] for prompt, text, told in traffic.answers)
    assert {told for _, _, told in traffic.answers} == set(answers)
