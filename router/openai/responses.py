"""JSON responses of the generation routes."""

from collections.abc import Mapping
from typing import Any

from pydantic_core import to_json
from starlette.responses import Response

CLIENT_LEFT = Response(status_code=499)
"""nginx's status for a client that has gone: nobody reads it, but access logs show it."""


def json_response(body: Mapping[str, Any], headers: Mapping[str, str]) -> Response:
    """``body`` as compact UTF-8 JSON."""
    return Response(to_json(body), headers=dict(headers), media_type="application/json")
