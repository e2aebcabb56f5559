"""Clients that never pause, and what they met."""

import asyncio
import json
import threading
import time
from collections import Counter
from dataclasses import dataclass

import httpx

CLIENTS = 8
TIMEOUT_S = 120.0
"""Far longer than a request may take: one that meets it has hung."""
BACK_OFF_S = 0.2


@dataclass(frozen=True)
class Answer:
    """What became of a request."""

    began: float
    """Wall clock, as ``ended``."""
    ended: float
    outcome: str
    """ok, pending, or a kind of failure such as ``503 replica_unavailable``."""
    replica: str = ""


class Traffic:
    """Sends completions from a thread of its own, every other one streamed, until it is closed."""

    def __init__(self, url: str, model: str) -> None:
        self._answers: list[Answer] = []
        self._pending: dict[int, float] = {}
        """When each client's request began."""
        self._url = url
        self._model = model
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Return when the last answer is in."""
        self._stopping.set()
        self._thread.join()

    def between(self, began: float, ended: float) -> list[Answer]:
        """Requests that were under way at some time in between."""
        pending = [Answer(since, ended, "pending") for since in list(self._pending.values())]
        return [answer for answer in [*self._answers, *pending] if answer.ended >= began and answer.began <= ended]

    async def _run(self) -> None:
        async with httpx.AsyncClient(base_url=self._url, timeout=TIMEOUT_S, trust_env=False) as client:
            await asyncio.gather(*(self._client(client, number) for number in range(CLIENTS)))

    async def _client(self, client: httpx.AsyncClient, number: int) -> None:
        turn = 0
        while not self._stopping.is_set():
            turn += 1
            prompt = f"client {number} of the hosts asks for the {turn}. time: the end of the world? " * 4
            body = {"model": self._model, "prompt": prompt, "max_tokens": 96, "ignore_eos": True}
            began = self._pending[number] = time.time()
            try:
                outcome, replica = await (self._stream if turn % 2 else self._ask)(client, body)
            except httpx.HTTPError as error:
                outcome, replica = type(error).__name__, ""
            self._answers.append(Answer(began, time.time(), outcome, replica))
            del self._pending[number]
            if outcome != "ok":
                await asyncio.sleep(BACK_OFF_S)

    @staticmethod
    async def _ask(client: httpx.AsyncClient, body: dict) -> tuple[str, str]:
        response = await client.post("/v1/completions", json=body)
        return _outcome(response.status_code, response.text), response.headers.get("x-warmroot-replica", "")

    @staticmethod
    async def _stream(client: httpx.AsyncClient, body: dict) -> tuple[str, str]:
        async with client.stream("POST", "/v1/completions", json=body | {"stream": True}) as response:
            replica = response.headers.get("x-warmroot-replica", "")
            if response.status_code != 200:
                return _outcome(response.status_code, (await response.aread()).decode()), replica
            last = ""
            async for line in response.aiter_lines():
                last = line.removeprefix("data: ") or last
        if last == "[DONE]":
            return "ok", replica
        try:
            return f"event {json.loads(last)['error']['code']}", replica
        except (ValueError, KeyError):
            return "stream cut short", replica


def _outcome(status: int, text: str) -> str:
    if status == 200:
        return "ok"
    try:
        return f"{status} {json.loads(text)['error']['code']}"
    except (ValueError, KeyError, TypeError):
        return f"{status} {text.strip()[:60]!r}"


def counted(answers: list[Answer]) -> str:
    """How many of each outcome, and the longest."""
    outcomes = Counter(answer.outcome for answer in answers)
    longest = max((answer.ended - answer.began for answer in answers), default=0.0)
    return f"{', '.join(f'{count} {name}' for name, count in outcomes.most_common())}; the longest took {longest:.1f} s"
