"""Errors as responses: always ``{"error": {message, type, param, code}}``, whatever raised them."""

import logging
from collections.abc import Mapping, Sequence
from math import ceil
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response

from ...cluster.errors import (
    ClientError,
    InvalidRequestError,
    OverloadedError,
    PoisonRequestError,
    ReplicaUnavailableError,
    WarmrootError,
)

log = logging.getLogger(__name__)

UNAVAILABLE_RETRY_S = 1.0
NO_OBJECT = "the request body must be a JSON object, sent with content-type application/json"


def error_response(error: WarmrootError) -> Response:
    """The response for an error of the tree; 429 and 503 say when to come back."""
    return JSONResponse(error.body(), error.status, retry_headers(error))


def retry_headers(error: WarmrootError) -> dict[str, str]:
    """``Retry-After`` in whole seconds and the finer ``retry-after-ms`` that OpenAI's SDKs read first.

    They heed ``x-should-retry``, too: what may have cost three replicas must not come again by itself.
    """
    if isinstance(error, PoisonRequestError):
        return {"x-should-retry": "false"}
    if isinstance(error, OverloadedError):
        seconds = error.retry_after
    elif isinstance(error, ReplicaUnavailableError):
        seconds = UNAVAILABLE_RETRY_S
    else:
        return {}
    return {"retry-after": str(max(1, ceil(seconds))), "retry-after-ms": str(max(1, ceil(seconds * 1000)))}


def error_body(message: str, type_: str, code: str | None = None, param: str | None = None) -> dict[str, Any]:
    """The body for an error outside the tree."""
    return {"error": {"message": message, "type": type_, "param": param, "code": code}}


def internal_error_body(request_id: str) -> dict[str, Any]:
    """What the client learns of a bug: where to find it in the log, and nothing else."""
    return error_body(f"internal error (request {request_id})", "server_error", "internal_error")


def body_of(error: Exception, request_id: str) -> dict[str, Any]:
    """The body of any error, for a stream that has begun; bugs go to the log."""
    if isinstance(error, WarmrootError):
        return error.body()
    log.error("request %s failed", request_id, exc_info=error)
    return internal_error_body(request_id)


def install_error_handlers(app: FastAPI) -> None:
    """Give every error that reaches FastAPI its status and body."""
    app.add_exception_handler(WarmrootError, _on_warmroot_error)
    app.add_exception_handler(RequestValidationError, _on_validation_error)
    app.add_exception_handler(HTTPException, _on_http_error)


async def _on_warmroot_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, WarmrootError)
    if not isinstance(error, ClientError):
        log.warning("%s: %s", type(error).__name__, error.message)
    return error_response(error)


async def _on_validation_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    return error_response(invalid_request(error.errors(), error.body))


async def _on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    messages = {
        404: f"no such endpoint: {request.method} {request.url.path}",
        405: f"{request.method} is not allowed for {request.url.path}",
    }
    codes = {404: "not_found", 405: "method_not_allowed"}
    type_ = "invalid_request_error" if error.status_code < 500 else "server_error"
    body = error_body(messages.get(error.status_code, error.detail), type_, codes.get(error.status_code))
    return JSONResponse(body, error.status_code, error.headers)


def invalid_request(errors: Sequence[Mapping[str, Any]], body: Any) -> InvalidRequestError:
    """One 400 out of pydantic's findings, about the first field at fault."""
    first = errors[0]
    if first["type"] == "json_invalid":
        reason = first.get("ctx", {}).get("error", "cannot be parsed")
        return InvalidRequestError(f"the request body is not valid JSON: {reason}")
    paths = [field_path(error, body) for error in errors]
    # The members of a union are tried one by one: the one that got furthest is what was meant.
    param = max((path for path in paths if f"{path}.".startswith(f"{paths[0]}.")), key=lambda path: path.count("."))
    if not param:
        return InvalidRequestError(NO_OBJECT)
    reasons = dict.fromkeys(error["msg"] for error, path in zip(errors, paths, strict=True) if path == param)
    return InvalidRequestError(f"{param}: {'; or '.join(reasons)}", param=param)


def field_path(error: Mapping[str, Any], body: Any) -> str:
    """The dotted path of the field at fault in ``body``; pydantic's names of union members are left out."""
    path: list[str] = []
    value = body
    for step in error["loc"][1:]:  # the first is "body"
        if _has(value, step):
            value = value[step]
            path.append(str(step))
    return ".".join([*path, str(error["loc"][-1])] if error["type"] == "missing" else path)


def _has(value: Any, step: str | int) -> bool:
    if isinstance(value, list):
        return isinstance(step, int) and step < len(value)
    return isinstance(value, dict) and step in value
