"""Tells the audit log of every request: who, what, how much, how it ended. Never what was said."""

from collections.abc import Callable
from datetime import datetime, timezone
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..json_lines import JsonLines
from ..tenancy.principal import Principal
from .middleware_access import OPEN_PATHS
from .record import CLIENT_LEFT_STATUS, RequestRecord
from .scopes import header, path_of

_LONGEST = 200
"""Characters of what a client wrote."""


class Audited:
    """An entry for each request but probes and scrapes.

    ``clock`` is the wall clock and ``monotonic`` measures durations, both in seconds.
    """

    def __init__(
        self, app: ASGIApp, *, log: JsonLines, clock: Callable[[], float], monotonic: Callable[[], float]
    ) -> None:
        self.app = app
        self._log = log
        self._clock = clock
        self._monotonic = monotonic

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """An ASGI application."""
        if scope["type"] != "http" or path_of(scope) in OPEN_PATHS:
            return await self.app(scope, receive, send)
        began, started, status = self._clock(), self._monotonic(), CLIENT_LEFT_STATUS

        async def send_noted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self.app(scope, receive, send_noted)
        except Exception:
            status = 500
            raise
        finally:
            self._log.add(_entry(scope, began, self._monotonic() - started, status))


def _entry(scope: Scope, began: float, duration_s: float, status: int) -> dict[str, Any]:
    state = scope["state"]
    record: RequestRecord = state["record"]
    principal: Principal = state.get("principal") or Principal()
    usage = None if record.usage is None else record.usage()
    client, forwarded = scope.get("client"), header(scope, b"x-forwarded-for")
    return {
        "time": datetime.fromtimestamp(began, timezone.utc).isoformat(timespec="milliseconds"),
        "request_id": state["request_id"],
        "key": principal.name,
        "tenant": principal.tenant,
        "method": scope["method"],
        "endpoint": path_of(scope)[:_LONGEST],
        "model": record.model,
        "status": status,
        "prompt_tokens": usage and usage.prompt_tokens,
        "completion_tokens": usage and usage.completion_tokens,
        "cached_tokens": usage and usage.cached_tokens,
        "replica": record.replica,
        "duration_s": round(duration_s, 6),
        "client": client and client[0],
        "forwarded_for": forwarded and forwarded[:_LONGEST],
    }
