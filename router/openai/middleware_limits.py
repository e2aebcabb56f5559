"""Requests and tokens per minute: counted before a request is read, settled when it has ended."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ...cluster.errors import RateLimitError
from ..tenancy.rate_limits import Quota, RateLimiter, is_limited
from .errors import error_response
from .middleware_access import is_for_admins
from .record import CLIENT_LEFT_STATUS, RequestRecord, principal_of
from .scopes import path_of


class RateLimits:
    """429 for keys and tenants that have had what they may; the others' responses say what they have left."""

    def __init__(self, app: ASGIApp, *, limiter: RateLimiter) -> None:
        self.app = app
        self._limiter = limiter

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """An ASGI application."""
        if scope["type"] != "http" or scope["method"] != "POST":
            return await self.app(scope, receive, send)
        principal = principal_of(scope)
        if not is_limited(principal) or is_for_admins(path_of(scope)):
            return await self.app(scope, receive, send)
        record: RequestRecord = scope["state"]["record"]
        quota = record.quota = Quota(self._limiter, principal)
        async with self._settled(record, quota, send) as send_told:
            try:
                await quota.take_request()
            except RateLimitError as error:
                return await error_response(error)(scope, receive, send_told)
            await self.app(scope, receive, send_told)

    @asynccontextmanager
    async def _settled(self, record: RequestRecord, quota: Quota, send: Send) -> AsyncGenerator[Send, None]:
        """A ``send`` that adds the headers; at the end, however it comes, what was used is charged."""
        status = CLIENT_LEFT_STATUS

        async def send_told(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                told = [(name.encode(), value.encode()) for name, value in quota.headers()]
                message["headers"] = [*message.get("headers", ()), *told]
            await send(message)

        try:
            yield send_told
        except Exception:
            status = 500
            raise
        finally:
            await quota.settle(record.charged_tokens(status))
