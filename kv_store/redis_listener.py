"""What one process hears on a Redis channel: published there, kept nowhere."""

from typing import Any, cast

from ..cluster.metadata_store import RedisAddress
from .redis_client import Client, node_of

_MOST_WORDS = 256


class Listener:
    """Subscribes when first asked. After an error it begins anew; what was said in between is lost."""

    def __init__(self, address: RedisAddress, channel: str) -> None:
        self.channel = channel
        self._address = address
        self._node: Client | None = None
        """A connection of its own, where the client has many nodes."""
        self._subscription: Any = None

    async def hear(self, client: Client, timeout_s: float) -> list[bytes]:
        """Words that came, after waiting up to ``timeout_s`` seconds for the first."""
        try:
            subscription = self._subscription or await self._subscribe(client)
            words: list[bytes] = []
            while len(words) < _MOST_WORDS:
                message = await subscription.get_message(timeout=0 if words else max(0.001, timeout_s))
                if message is None:
                    break
                if message["type"] == "message":
                    words.append(cast(bytes, message["data"]))
            return words
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        """Unsubscribe."""
        subscription, self._subscription = self._subscription, None
        if subscription is not None:
            await subscription.aclose()
        node, self._node = self._node, None
        if node is not None:
            await node.aclose()

    async def _subscribe(self, client: Client) -> Any:
        node = node_of(client, self._address, self.channel)
        self._node = None if node is client else node
        self._subscription = node.pubsub(ignore_subscribe_messages=True)
        await self._subscription.subscribe(self.channel)
        return self._subscription
