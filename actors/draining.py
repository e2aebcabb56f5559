"""How a replica that stops lets go of its requests: what ends soon may end here, the rest goes on elsewhere."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping

from ..cluster.ids import RequestId
from ..router.channel_server import ChannelServer

LOOK_S = 0.25
SOON = 0.5
"""Part of the grace in which a request must be expected to end, or it is handed back at once."""
LAST = 0.8
"""Part of the grace after which all that is left is handed back: there must be time for the rest of the farewell."""

logger = logging.getLogger(__name__)


async def drain(
    channel: ChannelServer,
    remaining: Callable[[], Mapping[RequestId, int]],
    has_others: Callable[[], Awaitable[bool]],
    grace_s: float,
) -> None:
    """Return once the channel has no request any more, after 0.8 of ``grace_s`` at the latest.

    ``remaining`` tells how many tokens each running request may still generate; how fast it does shows between two
    looks. ``has_others``: whether anyone else could go on; if not, all run on here as long as they may.
    """
    loop = asyncio.get_running_loop()
    began = looked = loop.time()
    before = remaining()
    while channel.owners and loop.time() < began + LAST * grace_s:
        await asyncio.sleep(LOOK_S)
        now, left = loop.time(), remaining()
        if await has_others():
            soon_s = max(0.0, began + SOON * grace_s - now)
            ends_soon = {
                request_id
                for request_id, tokens in left.items()
                if tokens * (now - looked) <= soon_s * (before.get(request_id, tokens) - tokens)
            }
            _hand_back(channel, [request_id for request_id in channel.owners if request_id not in ends_soon])
        before, looked = left, now
    _hand_back(channel, list(channel.owners))


def _hand_back(channel: ChannelServer, request_ids: list[RequestId]) -> None:
    if request_ids:
        logger.info("handing back %d requests that would take too long", len(request_ids))
        channel.hand_back(request_ids)
