"""JSON responses of the generation routes, and what the documentation says of them."""

import json
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel
from starlette.responses import Response

from .protocol import ErrorBody

CLIENT_LEFT = Response(status_code=499)
"""nginx's status for a client that has gone: nobody reads it, but access logs show it."""


def json_response(body: Mapping[str, Any], headers: Mapping[str, str]) -> Response:
    """``body`` as compact UTF-8 JSON."""
    text = json.dumps(body, ensure_ascii=False, separators=(",", ":"))
    return Response(text, headers=dict(headers), media_type="application/json")


def generation_responses(whole: type[BaseModel], event: type[BaseModel]) -> dict[int | str, dict[str, Any]]:
    """OpenAPI entries of a route that answers with ``whole``, or with a stream of ``event``."""
    errors = {status: {"model": ErrorBody} for status in (400, 401, 404, 413, 429, 500, 503, 504)}
    stream = {"schema": {"$ref": f"#/components/schemas/{event.__name__}"}}
    return {200: {"model": whole, "content": {"text/event-stream": stream}}, **errors}
