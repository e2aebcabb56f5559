"""Routes that read JSON strictly and fast.

Both use pydantic's parser, which is the faster one and refuses text that UTF-8 cannot carry.
"""

import json
from collections.abc import Callable, Coroutine
from inspect import signature
from typing import Any

from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError
from pydantic_core import from_json
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ...cluster.errors import InvalidRequestError
from .errors import NO_OBJECT, invalid_request


class JsonRoute(APIRoute):
    """FastAPI's route with another parser."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """The route's handler, given a request with our parser."""
        handle = super().get_route_handler()

        async def handle_json(request: Request) -> Response:
            return await handle(_JsonRequest(request.scope, request.receive))

        return handle_json


class GenerationRoute(APIRoute):
    """Calls ``endpoint(request, body)``, which gives a response, without FastAPI's dependencies and exit stacks.

    These take longer than everything else that an ingress does with HTTP. FastAPI still describes the route.
    """

    def __init__(self, path: str, endpoint: Callable[..., Any], **options: Any) -> None:
        super().__init__(path, endpoint, **options)
        self._model: type[BaseModel] = signature(endpoint).parameters["body"].annotation

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        """An ASGI application."""
        if scope["method"] != "POST":
            return await super().handle(scope, receive, send)
        request = Request(scope, receive)
        if not _is_json(request.headers.get("content-type") or "application/json"):
            raise InvalidRequestError(NO_OBJECT)
        response = await self.endpoint(request, _validated(self._model, await request.body()))
        await response(scope, receive, send)


class _JsonRequest(Request):
    async def json(self) -> Any:
        try:
            return from_json(await self.body())
        except ValueError as error:
            raise json.JSONDecodeError(str(error), "", 0) from None  # what FastAPI answers with 400


def _is_json(content_type: str) -> bool:
    """``application/json`` or ``application/*+json``, whatever the parameters."""
    kind = content_type.partition(";")[0].strip().lower()
    return kind == "application/json" or (kind.startswith("application/") and kind.endswith("+json"))


def _validated(model: type[BaseModel], data: bytes) -> BaseModel:
    """Raises InvalidRequestError naming the field at fault."""
    try:
        value = from_json(data)
    except ValueError as error:
        raise InvalidRequestError(f"the request body is not valid JSON: {error}") from None
    try:
        return model.model_validate(value)
    except ValidationError as error:
        errors = [{**found, "loc": ("body", *found["loc"])} for found in error.errors(include_url=False)]
        raise invalid_request(errors, value) from None
