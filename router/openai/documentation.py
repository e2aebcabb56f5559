"""The OpenAPI document: what FastAPI derives from the routes, plus stream events and API keys."""

from http import HTTPStatus
from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from .chat import ChatCompletionChunk
from .middleware_access import OPEN_PATHS
from .protocol import ErrorBody

_SCHEMAS = "#/components/schemas/"


def errors(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Responses of a route that may fail with these."""
    return {status: {"model": ErrorBody} for status in statuses}


ERRORS = errors(404, 503, 504)
"""Of a route that asks replicas for something."""


class DocumentedApp(FastAPI):
    """FastAPI whose document is complete."""

    def openapi(self) -> dict[str, Any]:
        """The document, made once."""
        if self.openapi_schema is None:
            document = super().openapi()
            components = document["components"]
            components["schemas"].update(_definitions(ChatCompletionChunk))
            components["securitySchemes"] = {"bearer": {"type": "http", "scheme": "bearer"}}
            document["security"] = [{}, {"bearer": []}]
            for path, operations in document["paths"].items():
                for operation in operations.values():
                    _document_errors(operation, closed=path not in OPEN_PATHS)
            for name in ("HTTPValidationError", "ValidationError"):  # ours are all of one form
                components["schemas"].pop(name, None)
        return super().openapi()


def generation_responses(whole: type[BaseModel], event: type[BaseModel]) -> dict[int | str, dict[str, Any]]:
    """The responses of a route that answers with ``whole``, or with a stream of ``event``."""
    return {200: {"model": whole, "content": {"text/event-stream": {"schema": _event_schema(event)}}}, **ERRORS}


def _event_schema(event: type[BaseModel]) -> dict[str, Any]:
    """One server-sent event, as OpenAPI 3.2 describes them: its data are JSON in a text, but for the last one."""
    payload = {"anyOf": [{"$ref": f"{_SCHEMAS}{name}"} for name in (event.__name__, ErrorBody.__name__)]}
    embedded = {"type": "string", "contentMediaType": "application/json", "contentSchema": payload}
    data = {"anyOf": [{"const": "[DONE]"}, embedded]}
    return {"type": "object", "required": ["data"], "properties": {"data": data}}


def _definitions(model: type[BaseModel]) -> dict[str, Any]:
    _, schema = models_json_schema([(model, "serialization")], ref_template=f"{_SCHEMAS}{{model}}")
    return schema["$defs"]


def _document_errors(operation: dict[str, Any], *, closed: bool) -> None:
    """What any request may be answered with; what a route adds stands there already."""
    responses = operation["responses"]
    responses.pop("422", None)  # FastAPI's own: an invalid request is a 400 here
    statuses = [431, 500]
    if closed:
        statuses += [401, 403, 429]
    if "requestBody" in operation:
        statuses += [400, 413]
    if "parameters" in operation:
        statuses.append(400)
    for status in sorted(statuses):
        schema = {"$ref": f"{_SCHEMAS}{ErrorBody.__name__}"}
        error = {"description": HTTPStatus(status).phrase, "content": {"application/json": {"schema": schema}}}
        responses.setdefault(str(status), error)
