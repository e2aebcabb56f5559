"""Clients as users write them: they try again what they are told to try again, and note all that befalls them."""

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from .answers import Answer, add
from .asks import Ask

RETRIED = (429, 503)
PATIENCE_S = 180.0
"""From the first try to the end; whoever waits longer has lost the request."""
CONNECT_S = 2.0
SILENCE_S = 90.0
BACK_OFF_S = 0.5


@dataclass(slots=True)
class Outcome:
    """What became of a request."""

    ask: Ask
    began: float
    """Monotonic seconds, as all moments here."""
    ended: float = 0.0
    answer: Answer = field(default_factory=dict)
    """Of the last try."""
    complete: bool = False
    """All of it is there, rather than a beginning after which the client left."""
    lost: str = ""
    """Why it did not end as it should."""
    refusals: Counter[str] = field(default_factory=Counter)
    """Answers that said before the first token that it should be tried again, by status and code."""
    cuts: list[tuple[float, str]] = field(default_factory=list)
    """When connections broke that had taken the request, or a proxy answered for an ingress; it was sent again."""
    beginnings: list[Answer] = field(default_factory=list)
    """What had come over those."""
    first_event_s: float | None = None
    """Time to the first event of the last try, if it was a stream."""


class _Broken(Exception):
    """The connection ended before the response did."""


class Clients:
    """Take requests of the pool, and note in ``outcomes`` how they ended."""

    def __init__(self, urls: Sequence[str], keys: Sequence[str], model: str, asks: Sequence[Ask]) -> None:
        """``urls`` are the cluster's doors, of which any will do; ``keys`` those of the tenants."""
        self.outcomes: list[Outcome] = []
        self._urls = urls
        self._keys = keys
        self._model = model
        self._asks = asks
        self._stopping = asyncio.Event()

    async def run(self, concurrency: int, seed: int, pause_s: float = 0.1) -> None:
        """A closed loop until ``stop``: each client takes a request, waits for its end, pauses, and takes another.

        Returns when the last answer is in.
        """
        async with self._connections(concurrency) as http:

            async def client(number: int) -> None:
                draw = random.Random(f"{seed} {number}")
                while not self._stopping.is_set():
                    await self._take(http, draw)
                    await asyncio.sleep(pause_s * draw.random())

            await asyncio.gather(*map(client, range(concurrency)))

    async def arrive(self, per_s: float, seed: int) -> None:
        """An open loop until ``stop``: requests come at random, so many a second, whatever has become of others."""
        draw = random.Random(seed)
        tasks: list[asyncio.Task[None]] = []
        async with self._connections(64) as http:
            while not self._stopping.is_set():
                await asyncio.sleep(draw.expovariate(per_s))
                tasks.append(asyncio.create_task(self._take(http, draw)))
            await asyncio.gather(*tasks)  # those that ended long ago, too: what failed one must be heard of

    def stop(self) -> None:
        """Take no further request."""
        self._stopping.set()

    def _connections(self, most_idle: int) -> httpx.AsyncClient:
        timeout = httpx.Timeout(SILENCE_S, connect=CONNECT_S)
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=most_idle, keepalive_expiry=4.0)
        return httpx.AsyncClient(timeout=timeout, limits=limits, trust_env=False)

    async def _take(self, http: httpx.AsyncClient, draw: random.Random) -> None:
        outcome = Outcome(draw.choice(self._asks), time.monotonic())
        await self.ask(http, outcome, draw)
        self.outcomes.append(outcome)

    async def ask(self, http: httpx.AsyncClient, outcome: Outcome, draw: random.Random) -> None:
        """Until it is answered or lost."""
        while not (outcome.complete or outcome.lost or outcome.ended):
            url = draw.choice(self._urls)
            try:
                await asyncio.wait_for(self._try(http, url, outcome), outcome.began + PATIENCE_S - time.monotonic())
            except asyncio.TimeoutError:
                outcome.lost = f"no end within {PATIENCE_S:g} s; before: {dict(outcome.refusals)}"
            except (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout):
                outcome.refusals["no connection"] += 1
                await asyncio.sleep(BACK_OFF_S)
            except httpx.ReadTimeout:
                outcome.lost = f"silent for {SILENCE_S:g} s"
            except (httpx.TransportError, _Broken) as error:
                outcome.cuts.append((time.monotonic(), str(error) or type(error).__name__))
                outcome.beginnings.append(outcome.answer)
                await asyncio.sleep(BACK_OFF_S)
        outcome.ended = time.monotonic()

    async def _try(self, http: httpx.AsyncClient, url: str, outcome: Outcome) -> None:
        ask, outcome.answer = outcome.ask, {}
        body = {**ask.body, "model": self._model, "stream": ask.stream}
        headers = {"authorization": f"Bearer {self._keys[ask.tenant]}"}
        began = time.monotonic()
        async with http.stream("POST", url + ask.path, json=body, headers=headers) as response:
            if response.status_code != 200:
                await self._refused(response, outcome)
            elif not ask.stream:
                add(outcome.answer, json.loads(await response.aread()))
                outcome.complete = True
            else:
                await self._read(response, outcome, began)

    async def _refused(self, response: httpx.Response, outcome: Outcome) -> None:
        text = (await response.aread()).decode(errors="replace")
        code = _code(text)
        if code is None:
            raise _Broken(f"{response.status_code} {text.strip()[:80]!r} of a proxy")
        reason = f"{response.status_code} {code}"
        if response.status_code not in RETRIED:
            outcome.lost = f"{reason}: {text[:300]}"
            return
        outcome.refusals[reason] += 1
        await asyncio.sleep(float(response.headers.get("retry-after", BACK_OFF_S)))

    async def _read(self, response: httpx.Response, outcome: Outcome, began: float) -> None:
        """A stream, to its end or to where the client leaves."""
        events = 0
        async for line in response.aiter_lines():
            payload = line.removeprefix("data: ")
            if payload == line:
                continue
            if payload == "[DONE]":
                outcome.complete = True
                return
            chunk = json.loads(payload)
            if "error" in chunk:
                outcome.lost = f"event {chunk['error']}"
                return
            if not events:
                outcome.first_event_s = time.monotonic() - began
            add(outcome.answer, chunk)
            events += 1
            if events == outcome.ask.leave_after:
                outcome.ended = time.monotonic()
                return
        raise _Broken("the stream ended without its end")


def _code(text: str) -> str | None:
    """The error's code; None if it is no answer of ours, but of a proxy that has nobody to ask."""
    try:
        error: Mapping[str, Any] = json.loads(text)["error"]
        return str(error["code"] or error["type"])
    except (ValueError, KeyError, TypeError):
        return None
