"""One asyncio loop on a thread of its own, usable from synchronous code and from any other loop."""

import asyncio
import threading
from collections.abc import AsyncGenerator, Coroutine, Generator
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")


class BackgroundLoop:
    """Runs coroutines and async generators on its loop for callers elsewhere. Closing an iterator closes its source."""

    def __init__(self, name: str = "warmroot-client") -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Wait, blocking, for the result."""
        future = self._submit(coroutine)
        try:
            return future.result()
        except BaseException:  # Ctrl-C in the caller must not leave the request running
            future.cancel()
            raise

    async def arun(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Wait for the result from another loop; cancelling the caller cancels the coroutine."""
        return await asyncio.wrap_future(self._submit(coroutine))

    def iterate(self, source: AsyncGenerator[T, None]) -> Generator[T, None, None]:
        """Blocking iteration."""
        try:
            while True:
                try:
                    item = self.run(anext(source))
                except StopAsyncIteration:
                    return
                yield item
        finally:
            if not self.loop.is_closed():
                self.run(source.aclose())

    async def aiterate(self, source: AsyncGenerator[T, None]) -> AsyncGenerator[T, None]:
        """Iteration from another loop."""
        try:
            while True:
                try:
                    item = await self.arun(anext(source))
                except StopAsyncIteration:
                    return
                yield item
        finally:
            if not self.loop.is_closed():
                # Shielded: a cancelled caller must still free the request's blocks.
                await asyncio.shield(self.arun(source.aclose()))

    def close(self) -> None:
        """Cancel what runs and stop the thread."""
        if self.loop.is_closed():
            return
        self.run(_cancel_others())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()

    def _submit(self, coroutine: Coroutine[Any, Any, T]) -> "Future[T]":
        if self.loop.is_closed():
            coroutine.close()
            raise RuntimeError("it has been closed")
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop)


async def _cancel_others() -> None:
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
