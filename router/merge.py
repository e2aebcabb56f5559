"""Several streams as one."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import TypeVar

T = TypeVar("T")


class _End:
    """A stream has ended, well or with an error."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error


async def merge(streams: Sequence[AsyncGenerator[T, None]]) -> AsyncGenerator[T, None]:
    """Items of all streams as they come. On the first error, on cancellation and on close, all are closed."""
    queue: asyncio.Queue[T | _End] = asyncio.Queue(maxsize=len(streams))
    pumps = [asyncio.create_task(_pump(stream, queue)) for stream in streams]
    num_open = len(pumps)
    try:
        while num_open:
            item = await queue.get()
            if not isinstance(item, _End):
                yield item
            elif item.error is not None:
                raise item.error
            else:
                num_open -= 1
    finally:
        for pump in pumps:
            pump.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)


async def _pump(stream: AsyncGenerator[T, None], queue: "asyncio.Queue[T | _End]") -> None:
    try:
        async with aclosing(stream):
            async for item in stream:
                await queue.put(item)
    except Exception as error:
        await queue.put(_End(error))
    else:
        await queue.put(_End())
