"""Waiting with a limit."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


async def within(timeout_s: float, work: Coroutine[Any, Any, T]) -> T:
    """What ``work`` returns or raises; asyncio.TimeoutError, and its end, after ``timeout_s``.

    ``asyncio.wait_for`` before Python 3.12 loses a cancellation that comes as the work ends: who was to stop goes on.
    """
    task = asyncio.ensure_future(work)
    try:
        done, _ = await asyncio.wait([task], timeout=timeout_s)
        if not done:
            raise asyncio.TimeoutError
        return task.result()
    finally:
        task.cancel()
