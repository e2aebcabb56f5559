"""The OpenAPI document: what FastAPI derives from the routes, plus stream events and API keys."""

from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from .chat import ChatCompletionChunk
from .protocol import ErrorBody

_SCHEMAS = "#/components/schemas/"


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
        return super().openapi()


def generation_responses(whole: type[BaseModel], event: type[BaseModel]) -> dict[int | str, dict[str, Any]]:
    """The responses of a route that answers with ``whole``, or with a stream of ``event``."""
    errors = {status: {"model": ErrorBody} for status in (400, 401, 404, 413, 429, 500, 503, 504)}
    stream = {"schema": {"$ref": f"{_SCHEMAS}{event.__name__}"}}
    return {200: {"model": whole, "content": {"text/event-stream": stream}}, **errors}


def _definitions(model: type[BaseModel]) -> dict[str, Any]:
    _, schema = models_json_schema([(model, "serialization")], ref_template=f"{_SCHEMAS}{{model}}")
    return schema["$defs"]
