"""Other weights for a cluster that runs: answers before and after, caches, failures, and what runs meanwhile."""

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import ray
import torch

from warmroot.actors.models.source import resolve_model
from warmroot.cluster.errors import InvalidRequestError
from warmroot.cluster.weights_update import NewWeights
from warmroot.deploy.cli import main

from .cluster_harness import Cluster, wait_until
from .other_weights import Trainer, other_weights, spoilt_weights

pytestmark = [pytest.mark.cluster, pytest.mark.model]

PROMPT = "The capital of France is a city that everybody knows, and many people who have been there say that"
ASKED = {"model": "smollm2", "prompt": PROMPT, "temperature": 0, "max_tokens": 12, "ignore_eos": True}


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return other_weights(tmp_path_factory.mktemp("weights"))


@pytest.fixture
def own(cluster: Cluster, client: httpx.Client) -> Iterator[str]:
    """The version that the cluster began with, which it has again afterwards."""
    [version] = versions(client)
    yield version
    cluster.handle.update_weights(str(resolve_model("smollm2")), version=version, mode="abort")
    wait_until(lambda: versions(client) == [version])


def versions(client: httpx.Client) -> list[str]:
    return client.get("/v1/models").json()["data"][0]["weights_versions"]


def ask(client: httpx.Client, **fields: Any) -> dict[str, Any]:
    response = client.post("/v1/completions", json=ASKED | fields)
    assert response.status_code == 200, response.text
    body = response.json()
    assert response.headers["x-warmroot-weights-version"] == body["usage"]["weights_versions"][0]
    return body


def text(body: dict[str, Any]) -> str:
    return body["choices"][0]["text"]


def cached(body: dict[str, Any]) -> int:
    return body["usage"]["prompt_tokens_details"]["cached_tokens"]


def update(client: httpx.Client, **body: Any) -> dict[str, Any]:
    response = client.post("/admin/update_weights", json=body)
    assert response.status_code == 200, response.text
    return response.json()


def test_a_checkpoint_from_disk(cluster: Cluster, client: httpx.Client, own: str, other: Path):
    before = ask(client)
    assert cached(ask(client)) == 16
    report = update(client, weights=str(other))
    new = report["weights_version"]
    assert new != own
    assert {one["replica"] for one in report["replicas"]} == {one.info.replica for one in cluster.replicas()}
    after = ask(client)
    assert (before["usage"]["weights_versions"], after["usage"]["weights_versions"]) == ([own], [new])
    assert text(after) != text(before)
    assert cached(after) == 0
    wait_until(lambda: versions(client) == [new])
    again = [ask(client) for _ in range(4)]
    assert {text(body) for body in again} == {text(after)}
    assert max(cached(body) for body in again) == 16
    assert update(client, weights=str(other))["weights_version"] == new  # all hold it: nothing happens
    update(client, weights=str(resolve_model("smollm2")), version=own)
    # What was hot with these weights may be computed again before anybody asks: cached tokens would be new ones.
    assert text(ask(client)) == text(before)


def test_tensors_of_an_actor_and_tensors_in_buckets(cluster: Cluster, client: httpx.Client, own: str, other: Path):
    before = text(ask(client))
    update(client, weights=str(other), version="file")
    expected = text(ask(client))
    cluster.handle.update_weights(str(resolve_model("smollm2")), version=own)
    assert text(ask(client)) == before
    trainer = ray.remote(Trainer).options(name="trainer", namespace="training", num_cpus=0).remote(other)
    report = update(client, actor="training/trainer", version="step-1")
    assert report["weights_version"] == "step-1"
    assert text(ask(client)) == expected
    num_tensors = len(ray.get(trainer.tensors.remote()))
    assert ray.get(trainer.num_fetched.remote()) >= 2 * num_tensors
    cluster.handle.update_weights(str(resolve_model("smollm2")), version=own)
    assert text(ask(client)) == before
    described = ray.get(trainer.tensors.remote())
    names = list(described)
    with cluster.handle.new_weights("step-2") as buckets:
        for start in range(0, len(names), 64):
            bucket = names[start : start + 64]
            buckets.add(dict(zip(bucket, ray.get([trainer.tensor.remote(name) for name in bucket]), strict=True)))
        assert text(ask(client)) == before
        assert buckets.commit().weights_version == "step-2"
    after = ask(client)
    assert text(after) == expected
    assert after["usage"]["weights_versions"] == ["step-2"]
    ray.kill(trainer)


def test_what_does_not_suit_changes_nothing(cluster: Cluster, client: httpx.Client, own: str, tmp_path: Path):
    before = text(ask(client))
    for path, message in (
        (spoilt_weights(tmp_path), "not finite"),
        (tmp_path / "gone.gguf", "gone"),
        (Path("/etc/passwd"), "expected a model folder"),
    ):
        response = client.post("/admin/update_weights", json={"weights": str(path)})
        assert response.status_code == 400, response.text
        assert "no replica has changed its weights" in response.json()["error"]["message"]
        assert message in response.json()["error"]["message"]
    with pytest.raises(InvalidRequestError, match="missing"):
        cluster.handle.update_weights({"model.norm.weight": torch.zeros(576)})
    with pytest.raises(InvalidRequestError, match="no Ray actor"):
        cluster.handle._update(NewWeights(version="x", actor="nobody"))
    assert client.post("/admin/update_weights", json={}).status_code == 400
    assert client.post("/admin/update_weights", json={"weights": "a", "model": "other"}).status_code == 404
    assert versions(client) == [own]
    assert text(ask(client)) == before


class Load:
    """Streams that follow one another until the end."""

    def __init__(self, url: str, num_clients: int, **fields: Any) -> None:
        self._url, self._fields = url, fields
        self.bodies: list[tuple[str, list[str], str]] = []
        self.errors: list[str] = []
        self._ended = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(number,)) for number in range(num_clients)]
        for thread in self._threads:
            thread.start()

    def end(self) -> None:
        self._ended.set()
        for thread in self._threads:
            thread.join(60)
        assert not self.errors, self.errors

    def _run(self, number: int) -> None:
        with httpx.Client(base_url=self._url, timeout=120, trust_env=False) as client:
            while not self._ended.is_set():
                response = client.post("/v1/completions", json=ASKED | self._fields)
                if response.status_code != 200:
                    self.errors.append(response.text)
                    return
                body = response.json()
                choice = body["choices"][0]
                self.bodies.append((choice["text"], body["usage"]["weights_versions"], choice["finish_reason"]))


@pytest.mark.parametrize("one_by_one", [False, True])
def test_under_load_every_answer_is_of_one_version(
    cluster: Cluster, client: httpx.Client, own: str, other: Path, one_by_one: bool
):
    load = Load(cluster.url, 6, max_tokens=24)
    wait_until(lambda: len(load.bodies) > 6)
    new = update(client, weights=str(other), one_by_one=one_by_one)["weights_version"]
    count = len(load.bodies)
    wait_until(lambda: len(load.bodies) > count + 12)
    load.end()
    assert {tuple(told) for _, told, _ in load.bodies} == {(own,), (new,)}
    by_version = {version: {text for text, told, _ in load.bodies if told == [version]} for version in (own, new)}
    assert all(len(texts) == 1 for texts in by_version.values()), by_version
    assert by_version[own] != by_version[new]


def test_in_place_a_stream_goes_on_and_says_so(cluster: Cluster, client: httpx.Client, own: str, other: Path):
    load = Load(cluster.url, 2, max_tokens=300)
    wait_until(lambda: sum(replica.load.running for replica in cluster.replicas()) == 2)
    new = update(client, weights=str(other), mode="in_place")["weights_version"]
    wait_until(lambda: len(load.bodies) >= 4)
    load.end()
    assert [own, new] in [told for _, told, _ in load.bodies]
    assert all(reason == "length" for _, _, reason in load.bodies)
    fresh = ask(client)
    assert fresh["usage"]["weights_versions"] == [new]


def test_abort_ends_what_runs_with_what_it_has(cluster: Cluster, client: httpx.Client, own: str, other: Path):
    load = Load(cluster.url, 2, max_tokens=900)
    wait_until(lambda: sum(replica.load.running for replica in cluster.replicas()) == 2)
    update(client, weights=str(other), mode="abort")
    wait_until(lambda: any(reason == "abort" for _, _, reason in load.bodies))
    assert all(told == [own] for _, told, reason in load.bodies if reason == "abort")
    update(client, weights=str(resolve_model("smollm2")), version=own, mode="abort")
    load._ended.set()
    load.end()


def test_requests_that_take_too_long_leave_all_as_it_was(cluster: Cluster, client: httpx.Client, own: str, other: Path):
    load = Load(cluster.url, 1, max_tokens=900)
    wait_until(lambda: sum(replica.load.running for replica in cluster.replicas()) == 1)
    response = client.post("/admin/update_weights", json={"weights": str(other), "timeout": 0.05, "one_by_one": True})
    load._ended.set()
    load.end()
    if response.status_code == 200:
        pytest.skip("the request had ended by then")
    assert response.status_code == 500
    message = response.json()["error"]["message"]
    assert "have not ended within 0.05 s" in message
    assert f"holds {own}" in message


def test_from_the_command_line(cluster: Cluster, client: httpx.Client, own: str, other: Path, capsys: Any):
    assert main(["update-weights", str(other), "--url", cluster.url, "--version", "of-the-cli"]) == 0
    assert "weights are of-the-cli now" in capsys.readouterr().out
    assert ask(client)["usage"]["weights_versions"] == ["of-the-cli"]
    assert main(["update-weights", "/nowhere", "--url", cluster.url]) == 2
    assert "no replica has changed" in capsys.readouterr().err


def test_a_replica_that_starts_later_holds_the_new_weights(
    cluster: Cluster, client: httpx.Client, own: str, other: Path
):
    new = update(client, weights=str(other))["weights_version"]
    before = {replica.info.replica: replica.info.pid for replica in cluster.replicas()}
    name, pid = next(iter(before.items()))
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: len(cluster.replicas()) == 2 and name not in {r.info.replica for r in cluster.replicas()}, 90)
    assert {replica.info.weights_version for replica in cluster.replicas()} == {new}
    assert {tuple(ask(client)["usage"]["weights_versions"]) for _ in range(6)} == {(new,)}
