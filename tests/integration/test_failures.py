"""A replica is killed, stopped or taken away while it serves. This comes last: others had to wait for the cluster."""

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import httpx
import pytest
import ray
from ray.util import list_named_actors

from warmroot.actors.embedded_bus import find_bus
from warmroot.actors.models.source import resolve_model
from warmroot.kv_store.hashing import pack_tokens
from warmroot.router.openai.cluster_state import ReplicaStatus
from warmroot.router.tokenizer import Tokenizer

from .cluster_harness import Cluster, wait_until

pytestmark = [pytest.mark.cluster, pytest.mark.model]

HOT = "A polite assistant who knows everything about bottles and beer answers. " * 12
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "seeded": {"temperature": 0.9, "top_p": 0.95},
    "penalties": {"temperature": 0, "frequency_penalty": 0.4, "repetition_penalty": 1.1},
    "logprobs": {"temperature": 0.7, "logprobs": 2},
    "stop": {"temperature": 0, "stop": ["wall 9", "zebra"], "min_tokens": 20},
    "two": {"temperature": 0.8, "n": 2},
}


@dataclass
class Answer:
    """All that a client has of a stream."""

    texts: list[str] = field(default_factory=lambda: ["", ""])
    logprobs: list[float] = field(default_factory=list[float])
    finish: list[str] = field(default_factory=lambda: ["", ""])
    usage: dict[str, Any] = field(default_factory=dict[str, Any])
    replica: str = ""
    started: asyncio.Event = field(default_factory=asyncio.Event)

    def same_as(self, other: "Answer") -> bool:
        """Whether nobody could tell them apart; log-probabilities up to what rounds differently."""
        if len(self.logprobs) != len(other.logprobs):
            return False
        close = all(abs(ours - theirs) < 0.01 for ours, theirs in zip(self.logprobs, other.logprobs, strict=True))
        tokens = ("prompt_tokens", "completion_tokens")
        counted = all(self.usage[key] == other.usage[key] for key in tokens)
        return close and counted and (self.texts, self.finish) == (other.texts, other.finish)


async def read_stream(client: httpx.AsyncClient, number: int, answer: Answer, num_tokens: int) -> Answer:
    """Request ``number``, of the kind whose turn it is."""
    # Short enough that the replica that is left has room for all.
    body = {
        "model": "smollm2",
        "prompt": f"{number} bottles of beer on the wall. " * 5,
        "seed": number,
        "max_tokens": num_tokens,
    }
    body |= {"stream": True, "stream_options": {"include_usage": True}, "ignore_eos": True}
    body |= list(KINDS.values())[number % len(KINDS)]
    async with client.stream("POST", "/v1/completions", json=body) as response:
        assert response.status_code == 200, await response.aread()
        answer.replica = response.headers["x-warmroot-replica"]
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                take(answer, json.loads(line.removeprefix("data: ")))
    return answer


def take(answer: Answer, chunk: dict[str, Any]) -> None:
    answer.started.set()
    assert "error" not in chunk, chunk
    for choice in chunk["choices"]:
        answer.texts[choice["index"]] += choice["text"]
        answer.finish[choice["index"]] = choice["finish_reason"] or ""
        answer.logprobs += choice["logprobs"]["token_logprobs"] if choice.get("logprobs") else []
    answer.usage = chunk["usage"] or answer.usage


async def read_streams(client: httpx.AsyncClient, answers: list[Answer], num_tokens: int) -> list[Answer]:
    return await asyncio.gather(*(read_stream(client, *numbered, num_tokens) for numbered in enumerate(answers)))


@asynccontextmanager
async def interrupted(
    cluster: Cluster, num_streams: int = 12, num_tokens: int = 40
) -> AsyncIterator[tuple[httpx.AsyncClient, str]]:
    """A client and a replica to be removed while streams run, whose answers must be those of an undisturbed run."""
    cluster.wait_idle()
    async with httpx.AsyncClient(base_url=cluster.url, timeout=120, trust_env=False) as client:
        await heat(client)
        expected = await read_streams(client, [Answer() for _ in range(num_streams)], num_tokens)
        answers = [Answer() for _ in range(num_streams)]
        streams = asyncio.create_task(read_streams(client, answers, num_tokens))
        while sum(answer.started.is_set() for answer in answers) < min(4, num_streams):  # none is through by then
            await asyncio.sleep(0.01)
        victim = next(answer.replica for answer in answers if answer.started.is_set())
        yield client, victim
        assert len({answer.replica for answer in await asyncio.wait_for(streams, 120)}) == 2
        wrong = [(n, a, e) for n, (a, e) in enumerate(zip(answers, expected, strict=True)) if not a.same_as(e)]
        assert not wrong, wrong


async def migrations(client: httpx.AsyncClient, reason: str) -> float:
    """Requests that have gone on elsewhere."""
    lines = (await client.get("/metrics")).text.splitlines()
    name = f'warmroot:migrations_total{{reason="{reason}"}}'
    return sum(float(line.split()[-1]) for line in lines if line.startswith(name))


async def test_nobody_notices_that_a_replica_is_killed(cluster: Cluster):
    before = cluster.replicas()
    async with interrupted(cluster) as (client, victim):
        os.kill(pid_of(before, victim), signal.SIGKILL)
        while not await migrations(client, "connection"):
            await asyncio.sleep(0.1)
    await check_recovery(cluster, before, victim)


async def test_nobody_notices_that_a_replica_stands_still_and_comes_back(cluster: Cluster):
    before = cluster.replicas()
    async with interrupted(cluster) as (client, victim):
        os.kill(pid_of(before, victim), signal.SIGSTOP)
        try:
            while not await migrations(client, "silence"):
                await asyncio.sleep(0.1)
        finally:
            os.kill(pid_of(before, victim), signal.SIGCONT)
    wait_until(lambda: {r.info.replica for r in cluster.replicas()} == {r.info.replica for r in before}, 60)
    cluster.wait_idle()


async def test_nobody_notices_that_a_replica_is_taken_away(cluster: Cluster):
    before = cluster.replicas()
    # Too long to end within half of the grace, and more than the other replica has room for at once.
    async with interrupted(cluster, num_tokens=100) as (client, victim):
        moved = await migrations(client, "draining")
        names = cast("list[dict[str, str]]", list_named_actors(all_namespaces=True))
        (actor,) = [one for one in names if one["name"].endswith(f"#{victim}")]
        handle: Any = ray.get_actor(actor["name"], namespace=actor["namespace"])
        # As Serve's controller does when there are too many, or new ones.
        await asyncio.wait_for(asyncio.wrap_future(handle.perform_graceful_shutdown.remote().future()), 60)
        ray.kill(handle)
        assert await migrations(client, "draining") > moved
    await check_recovery(cluster, before, victim)


def pid_of(replicas: list[ReplicaStatus], name: str) -> int:
    return next(replica.info.pid for replica in replicas if replica.info.replica == name)


async def check_recovery(cluster: Cluster, before: list[ReplicaStatus], victim: str) -> None:
    """Others serve meanwhile, and another one comes in the replica's place that is warm."""
    async with httpx.AsyncClient(base_url=cluster.url, timeout=120, trust_env=False) as client:
        await check_only_others_serve(client, victim)
    wait_until(lambda: len(cluster.replicas()) == 2, 120, cluster.handle.replicas)
    known = {replica.info.replica for replica in before}
    (new,) = {replica.info.replica for replica in cluster.replicas()} - known
    await asyncio.sleep(1.0)  # the ingress reads the bus for itself
    await check_is_warm(cluster, new)
    await check_all_serve(cluster)
    cluster.wait_idle()


async def heat(client: httpx.AsyncClient) -> None:
    """Use a prefix until the cluster knows that it is hot: others may be, from earlier tests."""
    bus = find_bus()
    assert bus is not None
    beginning = pack_tokens(Tokenizer.from_path(resolve_model("smollm2")).encode(HOT)[:128])
    for number in range(100):
        response = await client.post(
            "/v1/completions", json={"model": "smollm2", "prompt": f"{HOT}{number}", "max_tokens": 1}
        )
        assert response.status_code == 200, response.text
        if any(prefix.tokens.startswith(beginning) for prefix in await bus.hot(16)):
            return
        await asyncio.sleep(0.5)
    raise AssertionError("no router tells what is hot")


async def check_is_warm(cluster: Cluster, replica: str) -> None:
    """It has the prefix without having been asked for it."""
    async with httpx.AsyncClient(base_url=cluster.url, timeout=120, trust_env=False) as client:
        response = await client.post(
            "/v1/completions",
            json={"model": "smollm2", "prompt": f"{HOT}What?", "max_tokens": 1},
            headers={"x-warmroot-explain": "1"},
        )
    candidates = json.loads(response.headers["x-warmroot-routing"])["candidates"]
    (cached,) = [one["cached_tokens"] for one in candidates if one["replica"] == replica]
    assert cached >= 128, candidates


async def check_only_others_serve(client: httpx.AsyncClient, victim: str) -> None:
    for number in range(10):
        response = await client.post(
            "/v1/completions", json={"model": "smollm2", "prompt": f"{number} green", "max_tokens": 2}
        )
        assert response.status_code == 200, response.text
        assert response.headers["x-warmroot-replica"] != victim


async def check_all_serve(cluster: Cluster) -> None:
    missing = {replica.info.replica for replica in cluster.replicas()}
    async with httpx.AsyncClient(base_url=cluster.url, timeout=120, trust_env=False) as client:
        for turn in range(20):  # a replica that was slow at first gets little until the others are busy
            requests = [
                client.post(
                    "/v1/completions", json={"model": "smollm2", "prompt": f"{turn} {number} red", "max_tokens": 8}
                )
                for number in range(16)
            ]
            missing -= {response.headers["x-warmroot-replica"] for response in await asyncio.gather(*requests)}
            if not missing:
                return
    raise AssertionError(f"{missing} serve nothing")
