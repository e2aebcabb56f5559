"""The outermost ASGI layers around the routes: request id and last resort, and CORS.

Plain ASGI, because ``BaseHTTPMiddleware`` hides disconnects from the routes and costs a task per request.
"""

import json
import logging
import re
from collections.abc import Callable

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .ends import RequestEnds
from .errors import internal_error_body
from .middleware_access import is_for_admins
from .record import RequestRecord
from .scopes import header, path_of
from .settings import ApiSettings

log = logging.getLogger(__name__)

_REQUEST_ID = re.compile(r"[A-Za-z0-9._:\-]{1,128}")


class RequestBoundary:
    """Gives each request an id and a clock, and turns a bug into a 500 that says nothing but the id."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        settings: ApiSettings,
        new_id: Callable[[], str],
        clock: Callable[[], float],
        ends: RequestEnds,
    ) -> None:
        self.app = app
        self._ends = ends
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
        request_id = client_request_id(header(scope, b"x-request-id")) or self._new_id()
        state = scope.setdefault("state", {})
        state["request_id"] = request_id
        state["record"] = record = RequestRecord()
        self._ends.began(scope)
        responding = False

        async def send_stamped(message: Message) -> None:
            nonlocal responding
            if message["type"] == "http.response.start":
                responding, record.status = True, message["status"]
                milliseconds = round((self._clock() - started) * 1000)
                headers = [*message.get("headers", ()), (b"openai-processing-ms", b"%d" % milliseconds)]
                if self._settings.sends_request_id:
                    headers.append((b"x-request-id", state["request_id"].encode()))  # the body may have named it
                message["headers"] = headers
            await send(message)

        try:
            await self.app(scope, receive, send_stamped)
        except Exception:
            log.exception("request %s failed", request_id, extra={"request_id": request_id})
            if responding:
                record.status = 500
                raise  # the server must cut the connection: the client would take the rest for complete
            await _send_json(send_stamped, 500, internal_error_body(request_id))
        finally:
            self._ends.ended(scope, self._clock() - started)


class CrossOrigin(CORSMiddleware):
    """Starlette's CORS, but for what no cache keeps and no other origin asks for.

    What is an admin's is for other origins only where they are named.
    """

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """An ASGI application."""
        if scope["type"] == "http" and scope["method"] == "POST" and header(scope, b"origin") is None:
            return await self.app(scope, receive, send)
        if scope["type"] == "http" and self.allow_all_origins and is_for_admins(path_of(scope)):
            return await self.app(scope, receive, send)
        await super().__call__(scope, receive, send)


def client_request_id(value: str | None) -> str | None:
    """``value`` if it may stand in a header, a log line and an id; otherwise None."""
    return value if value is not None and _REQUEST_ID.fullmatch(value) else None


async def _send_json(send: Send, status: int, body: object) -> None:
    data = json.dumps(body).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(data)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": data})
