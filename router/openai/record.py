"""What becomes of one request, gathered while it is served: for its limits, logs, metrics and traces."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from starlette.types import Scope

from ..metrics import RequestMeter
from ..tenancy.principal import Principal
from ..tenancy.rate_limits import Quota
from .protocol import Usage

if TYPE_CHECKING:
    from opentelemetry.trace import Span

CLIENT_LEFT_STATUS = 499


@dataclass(slots=True)
class RequestRecord:
    """``scope["state"]["record"]``. Empty where a request did not get that far."""

    model: str = ""
    replica: str = ""
    usage: Callable[[], Usage] | None = None
    """Tokens of prompt and output so far."""
    quota: Quota | None = None
    """Where its key, or the key's tenant, has limits."""
    status: int = CLIENT_LEFT_STATUS
    """Of the response, once it has begun."""
    meters: Sequence[RequestMeter] = ()
    """One for each prompt."""
    span: "Span | None" = None
    """Where requests are traced."""
    trace: str = ""
    """``traceparent`` of ``span``, if it is recorded."""

    def charged_tokens(self, status: int) -> int:
        """Tokens that count in the limits: none of a request that was refused or failed."""
        if self.usage is None or (status >= 400 and status != CLIENT_LEFT_STATUS):
            return 0
        usage = self.usage()
        return usage.prompt_tokens + usage.completion_tokens


def principal_of(scope: Scope) -> Principal:
    """Whom the request comes from."""
    return scope["state"]["principal"]
