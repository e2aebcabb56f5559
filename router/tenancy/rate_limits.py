"""Requests and tokens per minute of a key and of its tenant: taken before, corrected after, told in headers."""

import asyncio
import logging
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress

from ...cluster.errors import RateLimitError
from ...cluster.within import within
from ...kv_store.quota import LocalQuota, QuotaStore, Spend, Spent
from .principal import Principal

log = logging.getLogger(__name__)

ANSWER_S = 0.25
"""A store that takes longer is not waited for."""
AWAY_S = 5.0
"""How long a store that failed is left alone."""
UNSAID_OUTPUT_TOKENS = 256
"""What is reserved for an output whose length is left open; what it takes beyond that is charged afterwards."""
KINDS = ("requests", "tokens")


class RateLimiter:
    """The buckets of all keys. ``shared`` is common to ``num_peers`` ingresses; without it each has its own part.

    The same holds while ``shared`` cannot be reached. ``clock`` gives monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float], shared: QuotaStore | None = None, num_peers: int = 1) -> None:
        self._clock = clock
        self._shared = shared if num_peers > 1 else None
        self._num_peers = num_peers
        self._local = LocalQuota(clock)
        self._away_until = -math.inf
        self.refused: dict[str, int] = dict.fromkeys(KINDS, 0)
        """Requests that got 429, by the kind of limit."""

    async def spend(self, spends: list[Spend], *, force: bool = False) -> Spent:
        """See ``QuotaStore``, but it never fails."""
        if self._shared is not None and self._clock() >= self._away_until:
            try:
                return await within(ANSWER_S, self._shared.spend(spends, force=force))
            except (ConnectionError, asyncio.TimeoutError) as error:
                self._away_until = self._clock() + AWAY_S
                log.warning("rate limits are not shared for now, each ingress keeps its part: %s", error or "no answer")
        # A bucket of everybody's size, from which this process takes as if all others did the same.
        parts = [spend._replace(cost=spend.cost * self._num_peers) for spend in spends]
        return await self._local.spend(parts, force=force)


class Quota:
    """What one request takes of its key's limits and its tenant's."""

    def __init__(self, limiter: RateLimiter, principal: Principal) -> None:
        self._limiter = limiter
        self._principal = principal
        self._reserved = 0.0
        self._levels: dict[str, tuple[float, float]] = {}
        """By kind: the bucket that is the emptiest, its level and its limit."""

    async def take_request(self) -> None:
        """Count the request. Raises RateLimitError."""
        await self._take("requests", 1, force=False)

    async def reserve(self, tokens: int) -> None:
        """Take the tokens of prompt and output that it may use. Raises RateLimitError."""
        await self._take("tokens", tokens, force=False)
        self._reserved = tokens

    async def settle(self, used_tokens: int) -> None:
        """Charge what was used in place of what was reserved. Call it at the end, however that came."""
        difference, self._reserved = used_tokens - self._reserved, 0.0
        if difference:
            with suppress(asyncio.CancelledError):
                await self._take("tokens", difference, force=True)

    def headers(self) -> Iterator[tuple[str, str]]:
        """OpenAI's ``x-ratelimit-*``, for each kind that is limited."""
        for kind, (level, limit) in self._levels.items():
            yield f"x-ratelimit-limit-{kind}", f"{limit:.0f}"
            yield f"x-ratelimit-remaining-{kind}", f"{max(0, math.floor(level))}"
            yield f"x-ratelimit-reset-{kind}", duration((limit - level) * 60.0 / limit)

    async def _take(self, kind: str, cost: float, *, force: bool) -> None:
        spends = [Spend(bucket, cost, limit) for bucket, limit in self._limits(kind)]
        if not spends:
            return
        spent = await self._limiter.spend(spends, force=force)
        level, spend = min(zip(spent.levels, spends, strict=True), key=lambda pair: pair[0] / pair[1].per_minute)
        self._levels[kind] = (level, spend.per_minute)
        if not spent.done:
            self._limiter.refused[kind] += 1
            raise _refusal(kind, spends, spent)

    def _limits(self, kind: str) -> Iterable[tuple[str, int]]:
        """(bucket, per minute) of the key and of the tenant, as far as they have limits."""
        principal = self._principal
        of_key, of_tenant = (
            (principal.requests_per_minute, principal.tenant_requests_per_minute)
            if kind == "requests"
            else (principal.tokens_per_minute, principal.tenant_tokens_per_minute)
        )
        if of_key is not None:
            yield f"key:{principal.name}:{kind}", of_key
        if of_tenant is not None:
            yield f"tenant:{principal.tenant}:{kind}", of_tenant


def is_limited(principal: Principal) -> bool:
    """Whether anything limits it per minute."""
    limits = (
        principal.requests_per_minute,
        principal.tokens_per_minute,
        principal.tenant_requests_per_minute,
        principal.tenant_tokens_per_minute,
    )
    return limits != (None, None, None, None)


def _refusal(kind: str, spends: list[Spend], spent: Spent) -> RateLimitError:
    """About the bucket that it takes longest to wait for."""
    wait_s, spend, level = max(zip(spent.waits_s, spends, spent.levels, strict=True))
    whose = spend.bucket.partition(":")[0]
    asked = f"limit {spend.per_minute:.0f}, left {max(0, math.floor(level))}, requested {spend.cost:.0f}"
    message = f"rate limit reached for this {whose} on {kind} per minute: {asked}; try again in {duration(wait_s)}"
    return RateLimitError(message, retry_after=wait_s)


def duration(seconds: float) -> str:
    """As OpenAI writes it: ``6m0s``, ``1.2s``, ``17ms``. Rounded up."""
    milliseconds = max(0, math.ceil(seconds * 1000))
    if milliseconds < 1000:
        return f"{milliseconds}ms" if milliseconds else "0s"
    minutes, rest = divmod(milliseconds, 60_000)
    hours, minutes = divmod(minutes, 60)
    shown = f"{rest / 1000:.3f}".rstrip("0").rstrip(".") + "s"
    if hours:
        return f"{hours}h{minutes}m{shown}"
    return f"{minutes}m{shown}" if minutes else shown
