"""ASGI layers around the routes: request id and last resort, API keys, body limit.

Plain ASGI, because ``BaseHTTPMiddleware`` hides disconnects from the routes and costs a task per request.
"""

import hmac
import json
import logging
import re
from collections.abc import Callable
from hashlib import sha256

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ...cluster.errors import AuthenticationError, PayloadTooLargeError
from .errors import error_response, internal_error_body
from .settings import ApiSettings

log = logging.getLogger(__name__)

OPEN_PATHS = frozenset(
    {"/health", "/livez", "/readyz", "/ping", "/metrics", "/version", "/docs", "/docs/oauth2-redirect", "/openapi.json"}
)
"""Served without an API key: probes, scrapes and the documentation."""

DISCARDED_BYTES = 16 * 1024 * 1024
"""How much of a body that is too large is still read, and thrown away."""

_REQUEST_ID = re.compile(r"[A-Za-z0-9._:\-]{1,128}")


class RequestBoundary:
    """Gives each request an id and a clock, and turns a bug into a 500 that says nothing but the id."""

    def __init__(
        self, app: ASGIApp, *, settings: ApiSettings, new_id: Callable[[], str], clock: Callable[[], float]
    ) -> None:
        self.app = app
        self._settings = settings
        self._new_id = new_id
        self._clock = clock

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """An ASGI application."""
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        if self._settings.root_path:
            scope["root_path"] = self._settings.root_path
        started = self._clock()
        request_id = client_request_id(_header(scope, b"x-request-id")) or self._new_id()
        state = scope.setdefault("state", {})
        state["request_id"] = request_id
        responding = False

        async def send_stamped(message: Message) -> None:
            nonlocal responding
            if message["type"] == "http.response.start":
                responding = True
                milliseconds = round((self._clock() - started) * 1000)
                headers = [*message.get("headers", ()), (b"openai-processing-ms", b"%d" % milliseconds)]
                if self._settings.sends_request_id:
                    headers.append((b"x-request-id", state["request_id"].encode()))  # the body may have named it
                message["headers"] = headers
            await send(message)

        try:
            await self.app(scope, receive, send_stamped)
        except Exception:
            log.exception("request %s failed", request_id)
            if responding:
                raise  # the server must cut the connection: the client would take the rest for complete
            await _send_json(send_stamped, 500, internal_error_body(request_id))


class CrossOrigin(CORSMiddleware):
    """Starlette's CORS, but for what no cache keeps and no other origin asks for."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """An ASGI application."""
        if scope["type"] == "http" and scope["method"] == "POST" and _header(scope, b"origin") is None:
            return await self.app(scope, receive, send)
        await super().__call__(scope, receive, send)


class BearerAuth:
    """401 for requests that do not carry one of the API keys; the tenant of the key goes into the scope."""

    def __init__(self, app: ASGIApp, *, settings: ApiSettings) -> None:
        self.app = app
        self._tenants = [(_digest(key.key.get_secret_value()), key.tenant) for key in settings.api_keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """An ASGI application."""
        if scope["type"] == "http" and self._tenants and not _is_open(scope):
            tenant = self._tenant(_header(scope, b"authorization") or "")
            if tenant is None:
                response = error_response(AuthenticationError("a valid API key is needed: Authorization: Bearer KEY"))
                response.headers["www-authenticate"] = "Bearer"
                return await response(scope, receive, send)
            scope.setdefault("state", {})["tenant"] = tenant
        await self.app(scope, receive, send)

    def _tenant(self, authorization: str) -> str | None:
        scheme, _, key = authorization.partition(" ")
        given, found = _digest(key.strip()), None
        for digest, tenant in self._tenants:  # every key is compared, so that time tells nothing
            if hmac.compare_digest(given, digest):
                found = tenant
        return found if scheme.lower() == "bearer" else None


class BodyLimit:
    """Reads the body before the routes see the request: 413 as soon as it exceeds the limit."""

    def __init__(self, app: ASGIApp, *, max_bytes: int) -> None:
        self.app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """An ASGI application."""
        if scope["type"] != "http" or scope["method"] not in {"POST", "PUT", "PATCH"}:
            return await self.app(scope, receive, send)
        try:
            length = _header(scope, b"content-length") or ""
            self._check(int(length) if length.isdecimal() else 0)
            body = await self._read(receive)
        except PayloadTooLargeError as error:
            return await self._refuse(error, receive, send)
        if body is not None:
            await self.app(scope, _replay(body, receive), send)

    async def _read(self, receive: Receive) -> bytes | None:
        parts: list[bytes] = []
        size = 0
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            part = message.get("body", b"")
            size += len(part)
            self._check(size)
            parts.append(part)
            if not message.get("more_body", False):
                return b"".join(parts)

    async def _refuse(self, error: PayloadTooLargeError, receive: Receive, send: Send) -> None:
        response = error_response(error)
        response.headers["connection"] = "close"
        await send({"type": "http.response.start", "status": response.status_code, "headers": response.raw_headers})
        await send({"type": "http.response.body", "body": response.body, "more_body": True})
        # A connection closed over unread data is reset, and the client may lose the response that it has not read yet.
        discarded, more = 0, True
        while more and discarded < DISCARDED_BYTES:
            message = await receive()
            discarded += len(message.get("body", b""))
            more = message.get("more_body", False)
        await send({"type": "http.response.body", "body": b""})

    def _check(self, size: int) -> None:
        if size > self._max_bytes:
            raise PayloadTooLargeError(f"the request body exceeds {self._max_bytes} bytes")


def client_request_id(value: str | None) -> str | None:
    """``value`` if it may stand in a header, a log line and an id; otherwise None."""
    return value if value is not None and _REQUEST_ID.fullmatch(value) else None


def _header(scope: Scope, name: bytes) -> str | None:
    """The first header of that name, which is in lower case as ASGI has them."""
    return next((value.decode("latin-1") for key, value in scope["headers"] if key == name), None)


def _replay(body: bytes, receive: Receive) -> Receive:
    pending = [body]

    async def replaying() -> Message:
        if pending:
            return {"type": "http.request", "body": pending.pop(), "more_body": False}
        return await receive()

    return replaying


def _is_open(scope: Scope) -> bool:
    path: str = scope["path"].removeprefix(scope.get("root_path", ""))
    return scope["method"] == "OPTIONS" or path in OPEN_PATHS


def _digest(key: str) -> bytes:
    return sha256(key.encode()).digest()


async def _send_json(send: Send, status: int, body: object) -> None:
    data = json.dumps(body).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(data)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": data})
