"""A thousand requests, good, bad and broken off: each ends as it should, and nothing of them stays behind."""

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import pytest

from .cluster_harness import Cluster

pytestmark = [pytest.mark.cluster, pytest.mark.model]

NUM_REQUESTS = 1000
CONCURRENCY = 48
DEADLINE_S = 120
WORDS = ("river", "stone", "cloud", "lamp", "green", "seven", "walk", "under", "bright", "paper")


class Storm:
    """Draws requests from ``seed`` and sends them; every kind of request is a method that checks its own answer."""

    def __init__(self, cluster: Cluster, client: httpx.AsyncClient, seed: int) -> None:
        self.cluster = cluster
        self.client = client
        self.draw = random.Random(seed)
        self.prefixes = [self.words(40) for _ in range(8)]
        self.sent: Counter[str] = Counter()
        self.ran_out = False

    @property
    def kinds(self) -> dict[Callable[[], Awaitable[None]], int]:
        """Each kind of request, and its weight."""
        return {
            self.completion: 30,
            self.chat: 12,
            self.stream: 20,
            self.two_choices: 4,
            self.disconnect: 12,
            self.abort: 8,
            self.bad_json: 4,
            self.bad_field: 4,
            self.unknown_model: 2,
            self.long_prompt: 2,
            self.large_body: 2,
        }

    async def run(self, num_requests: int) -> None:
        turns = asyncio.Semaphore(CONCURRENCY)
        kinds = self.kinds
        plan = self.draw.choices(list(kinds), list(kinds.values()), k=num_requests)

        async def take_turn(kind: Callable[[], Awaitable[None]]) -> None:
            async with turns:
                await asyncio.wait_for(kind(), DEADLINE_S)
                self.sent[kind.__name__] += 1

        await asyncio.gather(self.run_out_of_room(), *[take_turn(kind) for kind in plan])

    async def run_out_of_room(self) -> None:
        """Hold streams that together outgrow the replicas, until one of these is full. Then leave."""

        async def hold() -> None:
            while not self.ran_out:
                async with self.streaming(self.endless()) as response:
                    async for _ in response.aiter_lines():
                        usage = [replica.load.kv_usage for replica in self.cluster.handle.replicas()]
                        self.ran_out = self.ran_out or max(usage) > 0.9
                        if self.ran_out:
                            return

        await asyncio.wait_for(asyncio.gather(*[hold() for _ in range(4)]), DEADLINE_S)

    async def completion(self) -> None:
        body = await self.post("/v1/completions", 200, self.prompt())
        assert body["choices"][0]["finish_reason"] in ("stop", "length")

    async def chat(self) -> None:
        message = {"role": "user", "content": self.words(6)}
        body = await self.post("/v1/chat/completions", 200, {"messages": [message], "max_tokens": self.few()})
        assert body["choices"][0]["message"]["role"] == "assistant"

    async def two_choices(self) -> None:
        body = await self.post("/v1/completions", 200, self.prompt() | {"n": 2, "stop": ["."]})
        assert [choice["index"] for choice in body["choices"]] == [0, 1]

    async def stream(self) -> None:
        async with self.streaming(self.prompt()) as response:
            lines = [line async for line in response.aiter_lines() if line]
        assert lines[-1] == "data: [DONE]"
        assert json.loads(lines[-2].removeprefix("data: "))["choices"][0]["finish_reason"] in ("stop", "length")

    async def disconnect(self) -> None:
        """Leave after a few chunks of a stream that would go on for long."""
        left = self.draw.randint(1, 3)
        async with self.streaming(self.endless()) as response:
            async for line in response.aiter_lines():
                left -= line.startswith("data:")
                if not left:
                    return
        raise AssertionError("the stream ended by itself")

    async def abort(self) -> None:
        """Leave without having heard anything: in the queue, in the prefill, or between tokens."""
        request = self.client.post("/v1/completions", json=self.endless())
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(request, self.draw.uniform(0.001, 0.5))

    async def bad_json(self) -> None:
        body = json.dumps(self.prompt())
        await self.refused(400, body[: self.draw.randrange(1, len(body) - 1)])

    async def bad_field(self) -> None:
        wrong = [
            {"temperature": -1},
            {"max_tokens": "many"},
            {"n": 0},
            {"top_p": 2},
            {"stop": 5},
            {"prompt": None},
            {"logit_bias": {"x": 1}},
        ]
        await self.refused(400, json.dumps(self.prompt() | self.draw.choice(wrong)))

    async def unknown_model(self) -> None:
        await self.refused(404, json.dumps(self.prompt() | {"model": "none"}))

    async def long_prompt(self) -> None:
        body = await self.refused(400, json.dumps(self.prompt() | {"prompt": self.words(2500)}))
        assert body["error"]["code"] == "context_length_exceeded"

    async def large_body(self) -> None:
        await self.refused(413, json.dumps(self.prompt() | {"prompt": "x" * 300_000}))

    async def refused(self, status: int, content: str) -> dict[str, Any]:
        response = await self.client.post(
            "/v1/completions", content=content, headers={"content-type": "application/json"}
        )
        assert response.status_code == status, (content[:200], response.text)
        assert response.json()["error"]["message"]
        return response.json()

    async def post(self, path: str, status: int, body: dict[str, Any]) -> dict[str, Any]:
        response = await self.client.post(path, json=body)
        assert response.status_code == status, response.text
        return response.json()

    def streaming(self, body: dict[str, Any]) -> Any:
        return self.client.stream("POST", "/v1/completions", json=body | {"stream": True})

    def prompt(self) -> dict[str, Any]:
        text = self.draw.choice(self.prefixes) + " " + self.words(self.draw.randint(1, 40))
        return {"model": "smollm2", "prompt": text, "max_tokens": self.few(), "temperature": self.draw.choice([0, 1])}

    def endless(self) -> dict[str, Any]:
        return self.prompt() | {"max_tokens": 900, "ignore_eos": True}

    def few(self) -> int:
        return self.draw.randint(1, 16)

    def words(self, count: int) -> str:
        return " ".join(self.draw.choices(WORDS, k=count))


async def test_a_thousand_requests_leave_nothing_behind(cluster: Cluster):
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=cluster.url, timeout=None, limits=limits, trust_env=False) as client:
        storm = Storm(cluster, client, seed=20)
        await storm.run(NUM_REQUESTS)
        assert storm.ran_out
        assert sum(storm.sent.values()) == NUM_REQUESTS
        assert set(storm.sent) == {kind.__name__ for kind in storm.kinds}
        cluster.wait_idle()
        # The ingress hears of it a moment later than this process does.
        deadline = time.monotonic() + DEADLINE_S
        while (load := (await client.get("/load")).json())["server_load"] or any(usages(load)):
            assert time.monotonic() < deadline, load
            await asyncio.sleep(0.1)
        assert usages(load) == [0, 0]


def usages(load: dict[str, Any]) -> list[float]:
    """KV use of each replica."""
    return [replica["kv_cache_usage"] for replica in load["replicas"]]
