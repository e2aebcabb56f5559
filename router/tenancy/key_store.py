"""The keys of now: those of flags and environment, and those of a file that may change while the server runs."""

import asyncio
import logging
import os
from collections.abc import Callable
from pathlib import Path

from ...cluster.errors import ConfigError
from .key_file import read_key_file
from .key_ring import KeyRing
from .principal import Principal

log = logging.getLogger(__name__)

POLL_S = 1.0
"""How long a change of the file may go unnoticed."""


class KeyStore:
    """``fixed`` keys and those of the file at ``path``. Raises ConfigError when the file cannot be read at first.

    Later a file that is broken or gone changes nothing: the keys stay those that it had, and the log says why.
    ``clock`` is the wall clock and ``monotonic`` measures durations, both in seconds.
    """

    def __init__(
        self,
        fixed: KeyRing,
        path: Path | None = None,
        *,
        clock: Callable[[], float],
        monotonic: Callable[[], float],
    ) -> None:
        self._fixed = fixed
        self._path = path
        self._clock = clock
        self._monotonic = monotonic
        self._due = monotonic() + POLL_S
        self._reading: asyncio.Task[None] | None = None
        self._stamp = None if path is None else _stamp(path)
        self.ring = fixed if path is None else fixed.joined(read_key_file(path).ring())
        self.fault = ""
        """Why the file as it is now is not in use."""
        self.num_faults = 0
        """Times that the file could not be read, since start."""

    @property
    def is_open(self) -> bool:
        """Whether the API, but for ``/admin``, needs no key: there is no file, and no key but an admin's."""
        return self._path is None and all(principal.is_admin for principal in self.ring.principals())

    @property
    def has_keys(self) -> bool:
        """Whether any key is or might be known here."""
        return self._path is not None or len(self.ring) > 0

    async def find(self, key: str) -> Principal | None:
        """Whose ``key`` is now; None for a wrong, expired or disabled one."""
        if self._path is not None and self._monotonic() >= self._due:
            await self._refresh(self._path)
        return self.ring.find(key, self._clock())

    async def _refresh(self, path: Path) -> None:
        """Everybody who asks meanwhile waits for the same reading: nobody is let in by a key that was taken away."""
        if self._reading is None:
            stamp = _stamp(path)
            if stamp == self._stamp:
                self._due = self._monotonic() + POLL_S
                return
            self._reading = asyncio.get_running_loop().create_task(self._reload(path, stamp))
        await asyncio.shield(self._reading)

    async def _reload(self, path: Path, stamp: object) -> None:
        try:
            found = await asyncio.to_thread(read_key_file, path)
            self.ring, self.fault = self._fixed.joined(found.ring()), ""
            log.info("API keys: read %d of %s", len(found.keys), path)
        except Exception as error:
            self.fault = error.message if isinstance(error, ConfigError) else f"{path}: {type(error).__name__}"
            self.num_faults += 1
            log.error("API keys stay as they were: %s", self.fault)
        finally:
            self._stamp, self._reading = stamp, None
            self._due = self._monotonic() + POLL_S


def _stamp(path: Path) -> tuple[int, ...] | None:
    """What differs when the file was written or replaced; Kubernetes swaps a link on the way to it."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns
