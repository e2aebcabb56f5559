"""Replicas and nodes come with the load and go with it, down to none, and no client ever fails."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest

from warmroot.cluster.config import WarmrootConfig

from .autoscaled_nodes import Autoscaled, autoscaled_cluster
from .hosts_harness import why_no_hosts

pytestmark = [
    pytest.mark.slow,
    pytest.mark.hosts,
    pytest.mark.cluster,
    pytest.mark.model,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(why_no_hosts() is not None, reason=str(why_no_hosts())),
]

START_S = 180.0
"""A node and then a replica start, on a machine that does much else."""
DOWN_S = 300.0
MAX_REPLICAS = 2
HELD = 12
NUM_TOKENS = 64
KEYS: dict[str, Any] = {
    "threads_per_replica": 1,
    "num_kv_blocks": 256,
    "max_num_seqs": 4,
    "max_model_len": 1024,
    "max_num_queued_reqs": HELD,
    "keep_alive_interval": 1.0,
    "shutdown_grace": 10.0,
    "min_replicas": 0,
    "max_replicas": MAX_REPLICAS,
    "target_queue_wait": 0.2,
    "upscale_delay": 1.0,
    "downscale_delay": 6.0,
    "scale_to_zero_delay": 12.0,
}
HOT = "A polite assistant who knows everything about bottles and beer answers at length. " * 10
PROMPTS = [f"{HOT}Question {number}: what comes after {number} bottles?" for number in range(12)]


@dataclass
class Answers:
    """What clients got, and how warm those were who served them."""

    texts: list[tuple[int, str]] = field(default_factory=list)
    """Number of the prompt, and the whole answer."""
    first_hits: dict[str, tuple[int, int]] = field(default_factory=dict)
    """For each replica: cached and all prompt tokens of the first request that it served."""

    def take(self, number: int, answer: "Answer") -> None:
        self.texts.append((number, answer.text))
        self.first_hits.setdefault(answer.replica, (answer.cached_tokens, answer.prompt_tokens))


@dataclass
class Answer:
    """A greedy stream, once it is whole."""

    text: str
    replica: str
    """Who began it."""
    cached_tokens: int
    prompt_tokens: int
    first_s: float
    """Seconds to its first token."""


async def ask(client: httpx.AsyncClient, number: int) -> Answer:
    body = {"model": "smollm2", "prompt": PROMPTS[number], "max_tokens": NUM_TOKENS, "temperature": 0}
    body |= {"stream": True, "ignore_eos": True, "stream_options": {"include_usage": True}}
    began, first_s, text, usage, last = time.monotonic(), 0.0, "", {}, ""
    async with client.stream("POST", "/v1/completions", json=body) as response:
        assert response.status_code == 200, await response.aread()
        async for line in response.aiter_lines():
            last = line or last
            if line.startswith("data: {"):
                chunk = json.loads(line.removeprefix("data: "))
                assert "error" not in chunk, chunk
                text += "".join(choice["text"] for choice in chunk["choices"])
                first_s = first_s or time.monotonic() - began
                usage = chunk["usage"] or usage
        assert last == "data: [DONE]" and usage["completion_tokens"] == NUM_TOKENS, (last, usage)
    replica, cached = response.headers.get("x-warmroot-replica", ""), usage["prompt_tokens_details"]["cached_tokens"]
    return Answer(text, replica, cached, usage["prompt_tokens"], first_s)


@asynccontextmanager
async def clients(http: httpx.AsyncClient, count: int, answers: Answers) -> AsyncIterator[None]:
    """So many clients that ask one thing after the other; whoever fails, fails the test."""
    stop = asyncio.Event()

    async def ask_on(number: int) -> None:
        while not stop.is_set():
            answers.take(number, await ask(http, number))
            number = (number + 5) % len(PROMPTS)

    asking = [asyncio.create_task(ask_on(number)) for number in range(count)]
    try:
        yield
    finally:
        stop.set()
        await asyncio.gather(*asking)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Autoscaled]:
    with autoscaled_cluster(idle_s=6.0) as cluster:
        cluster.deploy(WarmrootConfig.of("smollm2", **KEYS))
        yield cluster
        print(f"\n{cluster.story()}")


def client_of(cluster: Autoscaled) -> httpx.AsyncClient:
    limits = httpx.Limits(max_connections=200)
    return httpx.AsyncClient(base_url=cluster.url, timeout=START_S, limits=limits, trust_env=False)


async def test_without_any_replica_the_api_answers(cluster: Autoscaled):
    assert cluster.look().counts == (0, 0, 0, 0)
    async with client_of(cluster) as client:
        assert (await client.get("/health")).status_code == 200
        [card] = (await client.get("/v1/models")).json()["data"]
        assert (card["id"], card["max_model_len"]) == ("smollm2", 1024)
        tokens = (await client.post("/tokenize", json={"model": "smollm2", "prompt": "Hello there"})).json()
        assert tokens["count"] == len(tokens["tokens"]) > 0
        too_long = await client.post("/v1/completions", json={"model": "smollm2", "prompt": [1] * 2000})
        assert too_long.status_code == 400  # it need not wait to be told so


async def test_from_zero_so_many_are_held_and_answered_and_the_others_told_when_to_come_back(cluster: Autoscaled):
    async with client_of(cluster) as client:
        asked = [asyncio.ensure_future(ask(client, number)) for number in range(HELD)]
        await wait_for_held(client, HELD)
        refused = await client.post("/v1/completions", json={"model": "smollm2", "prompt": "One too many"})
        assert refused.status_code == 429 and int(refused.headers["retry-after"]) >= 1, refused.text
        answers = await asyncio.gather(*asked)
    print(f"\n{HELD} requests at zero: first tokens after {[round(answer.first_s, 1) for answer in answers]} s")
    assert len({answer.text for answer in answers}) == len(PROMPTS)
    assert cluster.look().nodes >= 1


@pytest.fixture(scope="module")
def expected(cluster: Autoscaled) -> list[str]:
    """The answers of a cluster that nobody disturbs."""

    async def one_by_one() -> list[str]:
        async with client_of(cluster) as http:
            return [(await ask(http, number)).text for number in range(len(PROMPTS))]

    return asyncio.run(one_by_one())


async def test_load_brings_replicas_and_nodes_for_them(cluster: Autoscaled, expected: list[str]):
    answers = Answers()
    async with client_of(cluster) as http, clients(http, 8, answers):
        await cluster.until(lambda sight: sight.running == MAX_REPLICAS, START_S)
        assert cluster.look().nodes == MAX_REPLICAS
        await asyncio.sleep(2.0)  # the new one serves, too
    check(answers, expected)
    assert len({replica for replica in answers.first_hits if replica}) == MAX_REPLICAS


async def test_nobody_notices_that_a_node_is_taken_back(cluster: Autoscaled, expected: list[str]):
    answers = Answers()
    async with client_of(cluster) as http, clients(http, 5, answers):
        await cluster.until(lambda sight: sight.running == MAX_REPLICAS and not sight.starting, START_S)
        victim = cluster.replicas()[0]
        await asyncio.to_thread(cluster.drain_node, victim["node_id"], 60)
        await cluster.until(lambda _: victim["replica_id"] not in cluster.replica_ids(), START_S)
        # Its place was taken before it went, on a node that came for that.
        assert cluster.look().running >= 1
    check(answers, expected)


async def test_replicas_and_nodes_go_with_the_load(cluster: Autoscaled, expected: list[str]):
    answers = Answers()
    async with client_of(cluster) as http, clients(http, 1, answers):
        await cluster.until(lambda sight: sight.counts == (1, 1, 0, 0), DOWN_S)
    check(answers, expected)


async def test_the_last_one_goes_and_comes_back_for_the_next_request(cluster: Autoscaled, expected: list[str]):
    await cluster.until(lambda sight: sight.counts == (0, 0, 0, 0), DOWN_S)
    async with client_of(cluster) as http:
        assert (await http.get("/health")).status_code == 200
        answer = await ask(http, 0)
    print(f"\nfrom zero: first token after {answer.first_s:.1f} s, {answer.cached_tokens} tokens cached")
    assert answer.text == expected[0]


def check(answers: Answers, expected: list[str]) -> None:
    """Nobody failed, or the clients would have, and nobody got anything else than without any disturbance."""
    print(f"\n{len(answers.texts)} answers; of the first prompt of each replica was cached: {answers.first_hits}")
    assert [text for number, text in answers.texts if text != expected[number]] == []


async def wait_for_held(client: httpx.AsyncClient, count: int) -> None:
    while f"warmroot:queued_requests {count}.0" not in (await client.get("/metrics")).text:
        await asyncio.sleep(0.1)
