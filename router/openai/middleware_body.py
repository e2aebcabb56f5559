"""How much of a request is read: headers and body."""

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ...cluster.errors import HeadersTooLargeError, PayloadTooLargeError
from .errors import error_response
from .scopes import header

DISCARDED_BYTES = 16 * 1024 * 1024
"""How much of a body that is too large is still read, and thrown away."""


class HeaderLimit:
    """431 for headers that are too large, names and values together."""

    def __init__(self, app: ASGIApp, *, max_bytes: int) -> None:
        self.app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """An ASGI application."""
        if scope["type"] == "http":
            size = sum([len(name) + len(value) for name, value in scope["headers"]])
            if size > self._max_bytes:
                error = HeadersTooLargeError(f"the request's headers have {size} bytes, more than {self._max_bytes}")
                return await error_response(error)(scope, receive, send)
        await self.app(scope, receive, send)


class BodyLimit:
    """Reads the body before the routes see the request: 413 as soon as it exceeds the limit."""

    def __init__(self, app: ASGIApp, *, max_bytes: int, max_values: int) -> None:
        self.app = app
        self._max_bytes = max_bytes
        self._max_values = max_values

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """An ASGI application."""
        if scope["type"] != "http" or scope["method"] not in {"POST", "PUT", "PATCH"}:
            return await self.app(scope, receive, send)
        try:
            length = header(scope, b"content-length") or ""
            self._check(int(length) if length.isdecimal() else 0)
            body = await self._read(receive)
        except PayloadTooLargeError as error:
            return await self._refuse(error, receive, send)
        if body is None:
            return
        if len(body) > self._max_values and (values := _num_values(body)) > self._max_values:
            reason = f"the request body has {values} commas and brackets, more than {self._max_values}"
            return await error_response(PayloadTooLargeError(reason))(scope, receive, send)
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


def _num_values(body: bytes) -> int:
    """No more values than that are in a body of JSON, and reading it takes accordingly long."""
    return sum(map(body.count, (b",", b"[", b"{")))


def _replay(body: bytes, receive: Receive) -> Receive:
    pending = [body]

    async def replaying() -> Message:
        if pending:
            return {"type": "http.request", "body": pending.pop(), "more_body": False}
        return await receive()

    return replaying
