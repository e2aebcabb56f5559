"""What a response and its events look like, for the OpenAPI document."""

from typing import Any, Literal

from pydantic import BaseModel

from .bodies import ResponseBody


class OutputText(ResponseBody):
    """The text of a message."""

    type: Literal["output_text"]
    text: str
    annotations: list[Any]
    logprobs: list[Any]


class OutputItem(ResponseBody):
    """A ``message`` with content, or a ``function_call`` with name and arguments."""

    id: str
    type: Literal["message", "function_call"]
    status: Literal["in_progress", "completed", "incomplete"]
    role: Literal["assistant"] | None = None
    content: list[OutputText] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None


class InputTokensDetails(ResponseBody):
    """What the prompt's tokens cost."""

    cached_tokens: int
    """Prompt tokens whose KV was found in the cache."""


class OutputTokensDetails(ResponseBody):
    """What the output's tokens were for."""

    reasoning_tokens: int


class ResponseUsage(ResponseBody):
    """Tokens of one response."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ResponseObject(ResponseBody):
    """A response. What the request has said comes back in it."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    model: str
    status: Literal["in_progress", "completed", "incomplete"]
    """``incomplete``: cut at ``max_output_tokens``."""
    error: None = None
    incomplete_details: dict[str, str] | None
    instructions: str | None
    max_output_tokens: int | None
    output: list[OutputItem]
    parallel_tool_calls: bool
    previous_response_id: None = None
    store: Literal[False] = False
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_p: float
    truncation: str
    usage: ResponseUsage | None
    metadata: dict[str, str]


def response_documentation(whole: type[BaseModel]) -> dict[int | str, dict[str, Any]]:
    """The response itself, or a stream of events, each named after its ``type``."""
    event = {
        "type": "object",
        "required": ["event", "data"],
        "properties": {
            "event": {"type": "string"},
            "data": {"type": "string", "contentMediaType": "application/json", "contentSchema": {"type": "object"}},
        },
    }
    return {200: {"model": whole, "content": {"text/event-stream": {"schema": event}}}}
