"""The cluster's bus for synchronous code."""

from collections.abc import Mapping
from contextlib import suppress
from types import TracebackType

from ..cluster.errors import ConfigError
from ..cluster.messages import StartupNote
from ..kv_store.bus import ClusterBus
from .background_loop import BackgroundLoop


class SyncBus:
    """The bus for synchronous code: cleared before a start and after the end. A context manager that disconnects."""

    def __init__(self, bus: ClusterBus) -> None:
        self._bus = bus
        self._loop = BackgroundLoop("warmroot-launch")

    def check(self) -> None:
        """Raises ConfigError when the bus cannot be used."""
        try:
            self._loop.run(self._bus.check())
        except ConnectionError as error:
            raise ConfigError(f"metadata_store: {error}", param="metadata_store") from None

    def clear(self) -> None:
        """Forget what an earlier run, or this one, has left there."""
        self._loop.run(self._bus.clear())

    def notes(self) -> Mapping[str, StartupNote]:
        """How far the replicas are, as far as the bus can tell now."""
        with suppress(ConnectionError):
            return self._loop.run(self._bus.notes())
        return {}

    def __enter__(self) -> "SyncBus":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._loop.run(self._bus.close())
        self._loop.close()
