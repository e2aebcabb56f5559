"""Looks at the site from outside all the time: whether a new request is served, and whether all of it is there."""

import asyncio
import itertools
import time
from dataclasses import dataclass, field

import httpx

from .asks import COMPLETIONS
from .site import Site

PROBE_EVERY_S = 0.5
PROBE_TIMEOUT_S = 5.0
"""A small request that takes longer is not served normally, even on a machine that does much else."""
LOOK_EVERY_S = 1.0


@dataclass(frozen=True, slots=True)
class Look:
    """What was seen once; moments are monotonic seconds."""

    began: float
    ended: float
    amiss: str
    """Empty if all was well."""


@dataclass(slots=True)
class Watch:
    """``probes`` are requests of one token, each sent when it is due; ``looks`` say what the site lacks."""

    site: Site
    probes: list[Look] = field(default_factory=list)
    looks: list[Look] = field(default_factory=list)

    async def run(self) -> None:
        """Until it is cancelled."""
        probes: set[asyncio.Task[None]] = set()
        look = asyncio.create_task(self._look())
        try:
            for number in itertools.count():
                task = asyncio.create_task(self._probe(number))
                probes.add(task)
                task.add_done_callback(probes.discard)
                await asyncio.sleep(PROBE_EVERY_S)
        finally:
            for task in (look, *probes):
                task.cancel()

    async def _look(self) -> None:
        while True:
            began = time.monotonic()
            amiss = await asyncio.to_thread(self.site.what_is_amiss)
            self.looks.append(Look(began, time.monotonic(), amiss))
            await asyncio.sleep(LOOK_EVERY_S)

    async def _probe(self, number: int) -> None:
        """By a connection of its own, as a new client."""
        began, site = time.monotonic(), self.site
        body = {"model": site.size.model, "prompt": f"{number} times", "max_tokens": 1, "temperature": 0}
        url = site.urls[number % len(site.urls)] + COMPLETIONS
        try:
            async with httpx.AsyncClient(timeout=PROBE_TIMEOUT_S, trust_env=False) as http:
                asked = http.post(url, json=body, headers=site.headers)
                response = await asyncio.wait_for(asked, PROBE_TIMEOUT_S)
            amiss = "" if response.status_code == 200 else f"{response.status_code}"
        except (httpx.HTTPError, asyncio.TimeoutError) as error:
            amiss = type(error).__name__
        self.probes.append(Look(began, time.monotonic(), amiss))


def recovered(looks: list[Look], since: float, until: float) -> float | None:
    """Seconds from ``since`` to the end of the first good look after the last bad one before ``until``.

    0 if none was bad, None if none was good again.
    """
    seen = sorted((look for look in looks if look.began >= since), key=lambda look: look.began)
    bad = [place for place, look in enumerate(seen) if look.amiss and look.began < until]
    if not bad:
        return 0.0
    return next((look.ended - since for look in seen[bad[-1] + 1 :] if not look.amiss), None)
