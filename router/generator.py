"""Where tokens come from, as everything above the router sees it."""

from collections.abc import AsyncGenerator
from typing import Protocol

from ..cluster.messages import GenerateRequest, TokenDelta


class TokenGenerator(Protocol):
    """A cluster behind a dispatcher, or one engine in this process."""

    def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenDelta, None]:
        """Deltas of one sequence, in order, until one carries a finish reason.

        Closing the generator early aborts the request and frees its blocks. Raises a WarmrootError: before the
        first delta when the request is refused (OverloadedError, ReplicaUnavailableError, InvalidRequestError),
        later when the cluster loses it.
        """
        ...
