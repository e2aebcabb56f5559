"""A replica's part in an update of weights: it loads them beside its own, then adopts or drops them."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict, replace
from typing import Any, cast

from ..cluster.errors import DeadlineExceededError, InvalidRequestError, WarmrootError
from ..cluster.ids import BlockHash
from ..cluster.weights_update import UPDATE_MODES, NewWeights, UpdateMode
from .engine_host import EngineHost
from .local_engine import LocalEngine
from .models.fingerprint import fingerprint
from .models.source import resolve_model

Announce = Callable[[NewWeights, BlockHash, str], Awaitable[None]]
"""Told what the replica holds now, the root of its block hashes, and the weights' form."""

logger = logging.getLogger(__name__)


class WeightsChange:
    """What routers ask for over the channel: see ``answer``."""

    def __init__(self, host: EngineHost, engine: LocalEngine, announce: Announce) -> None:
        self.version = host.weights_version
        """Of the weights that the engine computes with."""
        self._host = host
        self._engine = engine
        self._announce = announce
        self._busy = asyncio.Lock()
        self._prepared: tuple[NewWeights, str] | None = None

    async def answer(self, what: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """``prepare_weights`` (the fields of NewWeights), ``adopt_weights`` (version, mode, timeout_s), or
        ``discard_weights``. Raises a WarmrootError; then the weights are what they were.
        """
        if self._busy.locked():
            raise InvalidRequestError("the replica is at another update of its weights")
        async with self._busy:
            match what:
                case "prepare_weights":
                    return {"weights_version": await self.prepare(NewWeights(**arguments))}
                case "adopt_weights":
                    mode = str(arguments["mode"])
                    if mode not in UPDATE_MODES:
                        raise InvalidRequestError(f"mode must be one of {', '.join(UPDATE_MODES)}", param="mode")
                    began = time.monotonic()
                    await self.adopt(str(arguments["version"]), cast(UpdateMode, mode), float(arguments["timeout_s"]))
                    return {"seconds": time.monotonic() - began}
                case "discard_weights":
                    await self.discard()
                    return {}
                case _:
                    raise InvalidRequestError(f"a replica does not know {what!r:.40}")

    async def prepare(self, new: NewWeights) -> str:
        """Load and check; returns the version. Nothing is loaded that the replica has already."""
        await self.discard()
        new = await asyncio.to_thread(_named, new)
        if new.version != self.version:
            self._prepared = new, await asyncio.to_thread(self._host.model.prepare, new)
        return new.version

    async def adopt(self, version: str, mode: UpdateMode, timeout_s: float) -> None:
        """Compute with what was prepared. With ``wait`` what runs may take ``timeout_s`` seconds to end."""
        if version == self.version:
            return
        if self._prepared is None or self._prepared[0].version != version:
            raise InvalidRequestError(f"no weights of version {version} were prepared")
        new, weights_format = self._prepared
        namespace = self._host.namespace(version, weights_format)
        done = asyncio.wrap_future(self._engine.change_weights(version, namespace, mode))
        await asyncio.wait([done], timeout=timeout_s)
        if not done.done() and self._engine.withdraw():
            raise DeadlineExceededError(f"running requests have not ended within {timeout_s:g} s")
        await done
        self._prepared, self.version = None, version
        logger.info("the weights are those of version %s now", version)
        await self._announce(new, namespace, weights_format)

    async def discard(self) -> None:
        """Drop what was prepared, if anything was."""
        if self._prepared is not None:
            self._prepared = None
            await asyncio.to_thread(self._host.model.discard)

    async def follow(self, wanted: Mapping[str, Any]) -> None:
        """Of a replica that starts after an update: hold what the others hold, if it can still be had."""
        if not wanted or wanted.get("version") == self.version:
            return
        try:
            version = await self.prepare(NewWeights(**wanted))
            await self.adopt(version, "in_place", timeout_s=self._host.config.limits.replica_start_timeout)
        except (WarmrootError, TypeError) as error:
            logger.warning("the replica begins with weights %s, not %s: %s", self.version, wanted, error)


def as_fields(new: NewWeights) -> dict[str, Any]:
    """For the channel and the bus."""
    return asdict(new)


def _named(new: NewWeights) -> NewWeights:
    if new.version:
        return new
    return replace(new, version=fingerprint(resolve_model(new.model, new.revision)))
