"""One storm over a site: clients, faults and watchers at the same time, and what came of it."""

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from .asks import Ask
from .clients import Clients
from .faults import Fault
from .schedule import Planned
from .site import KEYS, Site
from .watch import Watch

HEAL_FIRST_S = 200.0
"""Within which the site must be whole and idle again when the storm is over."""


@dataclass(slots=True)
class Event:
    """A fault as it happened; moments are monotonic seconds."""

    fault: Fault
    at: float
    target: str = ""
    """Empty: it found no victim."""
    healed: float | None = None


@dataclass(slots=True)
class Storm:
    """``run`` it once."""

    site: Site
    clients: Clients
    watch: Watch
    say: Callable[[str], None]
    events: list[Event] = field(default_factory=list)
    began: float = 0.0
    ended: float = 0.0

    @classmethod
    def over(cls, site: Site, asks: Sequence[Ask], say: Callable[[str], None]) -> "Storm":
        """Clients that ask for these."""
        return cls(site, Clients(site.urls, KEYS, site.size.model, asks), Watch(site), say)

    async def run(self, plan: Sequence[Planned], *, seconds: float, concurrency: int, seed: int) -> None:
        """Faults by the plan; then no new requests, until all have ended and the site is whole."""
        self.began = time.monotonic()
        load = asyncio.create_task(self.clients.run(concurrency, seed))
        watching = asyncio.create_task(self.watch.run())
        try:
            await asyncio.gather(*map(self._one, plan))
            await asyncio.sleep(self.began + seconds - time.monotonic())
            self.clients.stop()
            await load
            self.ended = time.monotonic()
            await self._wait_whole()
        finally:
            watching.cancel()
            load.cancel()

    async def _one(self, planned: Planned) -> None:
        await asyncio.sleep(self.began + planned.at_s - time.monotonic())
        event = Event(planned.fault, time.monotonic())
        self.events.append(event)
        strike = await asyncio.to_thread(planned.fault.strike, self.site, random.Random(planned.seed))
        event.target = strike.target if strike else ""
        self.say(f"{event.at - self.began:6.1f} s  {planned.fault.name}: {event.target or 'no victim'}")
        if strike and strike.heal:
            await asyncio.sleep(event.at + planned.fault.lasts_s - time.monotonic())
            await asyncio.to_thread(strike.heal)
            event.healed = time.monotonic()

    async def _wait_whole(self) -> None:
        """Not longer than it may take: what is still amiss then is told by the checks."""
        while time.monotonic() < self.ended + HEAL_FIRST_S:
            if self.watch.looks and self.watch.looks[-1].began > self.ended and not self.watch.looks[-1].amiss:
                return
            await asyncio.sleep(0.5)
