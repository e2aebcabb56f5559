"""Requests that wait while there is no replica at all, as before the first one has started and after the last has gone.

They are bounded as the queue in front of one replica is, and who got a place keeps it until a replica comes.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NoReturn

from ..cluster.errors import OverloadedError
from .admission import QueueLimits
from .policy.base import RoutingRequest

START_S = 30.0
"""What a replica is taken to need to start as long as none was waited for."""
_LEAST_WAIT_S = 1.0


class Hold:
    """``clock`` gives seconds. ``num_requests`` wait now, with ``tokens`` in their prompts."""

    def __init__(self, limits: QueueLimits, clock: Callable[[], float]) -> None:
        self.num_requests = 0
        self.tokens = 0
        self.refused = 0
        self._limits = limits
        self._clock = clock
        self._since: float | None = None
        self._start_s = START_S

    @contextmanager
    def place(self, request: RoutingRequest, *, moved: bool) -> Iterator[None]:
        """A place for a request, within the block; one that was let in elsewhere (``moved``) always gets one.

        Raises OverloadedError when all are taken, with the time after which a replica should be there.
        """
        if self._since is None:
            self._since = self._clock()
        if not (moved or request.admitted or self._has_room(request)):
            self._refuse(self._since + self._start_s - self._clock())
        self.num_requests += 1
        self.tokens += request.prompt_tokens
        try:
            yield
        finally:
            self.num_requests -= 1
            self.tokens -= request.prompt_tokens
            if not self.num_requests:
                self._since = None

    def end(self) -> None:
        """There is a replica: so long it took to start, and the next one may take as long."""
        if self._since is not None:
            self._start_s, self._since = self._clock() - self._since, None

    def _has_room(self, request: RoutingRequest) -> bool:
        tokens = self.tokens + request.prompt_tokens + request.company_tokens
        return self.num_requests < self._limits.max_requests and (
            not self.num_requests or tokens <= self._limits.max_tokens
        )

    def _refuse(self, left_s: float) -> NoReturn:
        self.refused += 1
        wait_s = max(_LEAST_WAIT_S, left_s)
        raise OverloadedError(
            f"{self.num_requests} requests wait for the first replica already: try again in {wait_s:.2f} s",
            retry_after=wait_s,
        )
