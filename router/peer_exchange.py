"""Carries the words of one router's ``Peers`` to the bus, and the others' words back."""

import asyncio
import logging
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any

from ..cluster.within import within
from ..kv_store.bus import FROM_NOW, BusReader
from .peers import Peers

BEAT_S = 1.0
"""Every router is heard this often, whether it has news or not."""
GATHER_S = 0.005
"""After a word, news gather for this long, or for ten times what telling takes, so that it stays a small part of the
work. What comes after a pause is told at once.
"""
RETRY_S = 1.0

logger = logging.getLogger(__name__)


class PeerExchange:
    """Runs in the background from ``start`` to ``close``. ``skipped`` counts words that could not be read.

    ``name`` tells the router from all others.
    """

    def __init__(self, bus: BusReader, peers: Peers, name: str) -> None:
        self.skipped = 0
        self._bus = bus
        self._peers = peers
        self._news = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        peers.name = name
        peers.on_news = self._news.set

    def start(self) -> None:
        """Call it on the router's event loop."""
        loop = asyncio.get_running_loop()
        self._tasks = [loop.create_task(self._tell_forever()), loop.create_task(self._hear_forever())]

    def close(self) -> None:
        """The others forget this router once they miss its words."""
        for task in self._tasks:
            task.cancel()

    async def _tell_forever(self) -> None:
        loop = asyncio.get_running_loop()
        due = loop.time()
        while True:
            everything = loop.time() >= due
            due = loop.time() + BEAT_S if everything else due
            self._news.clear()
            began = loop.time()
            await self._safely(self._bus.share(self._peers.word(everything=everything)))
            took = loop.time() - began
            self._peers.expire()
            await asyncio.sleep(min(max(GATHER_S, 10 * took), BEAT_S / 2))
            with suppress(asyncio.TimeoutError):
                await within(max(0.0, due - loop.time()), self._news.wait())

    async def _hear_forever(self) -> None:
        heard = FROM_NOW
        while True:
            words, heard = await self._safely(self._bus.hear(heard, BEAT_S)) or ([], FROM_NOW)
            for word in words:
                self._take(word)

    def _take(self, word: bytes) -> None:
        try:
            self._peers.hear(word)
        except ValueError as error:
            self.skipped += 1
            logger.warning("skipping what a router said: %s", error)

    async def _safely(self, work: Coroutine[Any, Any, Any]) -> Any:
        """None when the bus is away: routing goes on without the others' words."""
        try:
            return await work
        except ConnectionError as error:
            logger.debug("words between routers are lost: %s", error)
        except Exception:
            logger.exception("words between routers are lost; going on")
        await asyncio.sleep(RETRY_S)
        return None
