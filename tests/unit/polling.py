"""Waiting for what another task brings about."""

import asyncio


async def until(condition):
    """Until it holds; TimeoutError after 20 s."""

    async def poll():
        while not condition():
            await asyncio.sleep(0.002)

    await asyncio.wait_for(poll(), 20)
