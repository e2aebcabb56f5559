"""Waiting with a limit loses neither results nor cancellations."""

import asyncio

import pytest

from warmroot.cluster.within import within


async def test_the_result_or_the_error_of_the_work():
    async def work(value):
        await asyncio.sleep(0)
        if value is None:
            raise KeyError("x")
        return value

    assert await within(5.0, work(3)) == 3
    with pytest.raises(KeyError):
        await within(5.0, work(None))


async def test_after_the_limit_the_work_is_ended():
    ended = asyncio.Event()

    async def work():
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    with pytest.raises(asyncio.TimeoutError):
        await within(0.001, work())
    await asyncio.wait_for(ended.wait(), 20)


async def test_a_cancellation_that_comes_as_the_work_ends_is_not_lost():
    event = asyncio.Event()
    task = asyncio.ensure_future(within(5.0, event.wait()))
    await asyncio.sleep(0.01)
    event.set()
    await asyncio.sleep(0)  # the work is done, who waits for it has not run yet
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_cancelled_caller_takes_the_work_along():
    ended = asyncio.Event()

    async def work():
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    task = asyncio.ensure_future(within(5.0, work()))
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await asyncio.wait_for(ended.wait(), 20)
