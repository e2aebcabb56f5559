"""Takes a cluster down, whatever of it still runs."""

import signal
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress

import ray
from ray import serve as ray_serve

from ..actors.embedded_bus import end_bus, find_bus
from .app import APP_NAME
from .local_ray import lost_daemons, started_here, stop_local_ray
from .sync_bus import SyncBus

MARGIN_S = 20.0
"""What Serve takes beside the grace of its actors."""
_LOOK_S = 0.2


def shutdown(within_s: float = 60.0) -> None:
    """Take the application and the bus down; Ray and Serve too if this process started them.

    Of a Ray that this process started nothing is left after ``within_s`` seconds, or at once when its daemons are gone.
    """
    if not ray.is_initialized():
        return
    with uninterrupted():
        if not started_here():
            _take_down()
            return
        work = threading.Thread(target=_take_down, name="warmroot-take-down", daemon=True)
        work.start()
        deadline = time.monotonic() + within_s
        while work.is_alive() and time.monotonic() < deadline and not lost_daemons():
            work.join(_LOOK_S)
        stop_local_ray()


@contextmanager
def uninterrupted() -> Generator[None, None, None]:
    """A second Ctrl-C must not leave half a cluster behind."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _take_down() -> None:
    with suppress(Exception):  # a cluster that is half up has nothing left to save
        ray_serve.delete(APP_NAME)
    with suppress(Exception):
        bus = find_bus()
        if bus is not None:
            with SyncBus(bus) as ours:
                ours.clear()
    with suppress(Exception):
        end_bus()
