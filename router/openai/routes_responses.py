"""``POST /v1/responses``: a chat completion in the words of the Responses API, without anything that is stored."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from fastapi import APIRouter, Request
from pydantic import ValidationError
from starlette.responses import Response

from ...cluster.errors import ClientError
from ..output import OutputDelta
from .chat import ChatCompletionRequest
from .documentation import ERRORS
from .errors import invalid_request
from .generation import Generation
from .json_route import GenerationRoute
from .limits import check_fields, check_messages, with_output_limit
from .record import principal_of
from .response_body import ResponseWriter
from .response_request import ResponseRequest
from .response_schema import ResponseObject, response_documentation
from .responses import CLIENT_LEFT, json_response
from .service import Service
from .tool_use import ToolUse

_NAMES = {
    "messages": "input",
    "prompt": "input",
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
}
"""Fields of chat completions, and what they are here."""


def response_routes(service: Service) -> APIRouter:
    """The Responses API over ``service``."""
    router = APIRouter(tags=["responses"], route_class=GenerationRoute)

    @router.post("/v1/responses", responses=response_documentation(ResponseObject) | ERRORS)
    async def create_response(request: Request, body: ResponseRequest) -> Response:
        """Answer a text or a conversation, whole or as server-sent events."""
        name, frontend = service.model(body.model, principal_of(request.scope))
        body.refuse_unsupported()
        with _naming_fields():
            chat, limits = _as_chat(body), service.settings.limits
            check_fields(chat, limits)
            check_messages(chat, limits)
            params = with_output_limit(chat.to_sampling_params(), limits)
            calls = ToolUse.of(chat, frontend, service.new_id)
            params = await service.grammars.applied(params, chat.asked_grammar(), limits)
            if calls is not None:
                params = await calls.applied(params, service)
            prompt = await service.texts.render(frontend, chat, whole=body.truncation != "auto")
            prompt = chat.truncate(prompt, frontend.max_model_len - (params.max_tokens or 1))
            generation = Generation.of(service, name, frontend, request, chat, [prompt], params, "resp")
            writer = _writer(generation, body, calls)
            if body.stream:
                return await generation.stream(writer)
            outputs = await generation.outputs()
        if outputs is None:
            return CLIENT_LEFT
        [output] = outputs
        [choice] = output.completions
        writer.take(OutputDelta(text=choice.text, finish_reason=choice.finish_reason))
        headers = generation.headers(output.replica, output.cached_tokens, output.first_weights)
        return json_response(writer.body(), headers)

    return router


def _as_chat(body: ResponseRequest) -> ChatCompletionRequest:
    fields = body.as_chat()
    try:
        return ChatCompletionRequest.model_validate(fields)
    except ValidationError as error:
        errors = [{**found, "loc": ("body", *found["loc"])} for found in error.errors(include_url=False)]
        raise invalid_request(errors, fields) from None


def _writer(generation: Generation, body: ResponseRequest, calls: ToolUse | None) -> ResponseWriter:
    envelope = generation.envelope
    head: dict[str, Any] = {
        "id": envelope.id.replace("-", "_", 1),
        "object": "response",
        "created_at": envelope.created,
        "model": envelope.model,
    }
    parser = None if calls is None else calls.parser()
    return ResponseWriter(head, body, generation.usage, parser, generation.service.new_id)


@contextmanager
def _naming_fields() -> Iterator[None]:
    """Errors name the fields that the client knows, rather than the ones that they became."""
    try:
        yield
    except ClientError as error:
        error.param = None if error.param is None else _renamed(error.param)
        raise


def _renamed(param: str) -> str:
    """A path in a chat request as a path in the request for a response."""
    for ours, theirs in (
        ("response_format.json_schema", "text.format"),
        ("tool_choice.allowed_tools", "tool_choice"),
        ("tool_choice.function", "tool_choice"),
        *_NAMES.items(),
    ):
        if param == ours or param.startswith(f"{ours}."):
            param = _NAMES.get(param, theirs) if theirs == "input" else theirs + param[len(ours) :]
            break
    is_tool = param.startswith(("tools.", "tool_choice."))  # whose fields stand in the tool itself here
    return param.replace(".function", "", 1) if is_tool else param
