"""The request of ``POST /v1/responses``, and the chat request that says the same."""

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from ...cluster.errors import InvalidRequestError
from .bodies import RequestBody
from .chat import ChatCompletionRequest
from .tools import ToolName

_LOGPROBS = "message.output_text.logprobs"


class TextPart(RequestBody):
    """A part of a message. Only text is served."""

    type: str
    """``input_text`` or ``output_text``."""
    text: str | None = None
    """The text."""


class MessageItem(RequestBody):
    """One turn of the conversation."""

    type: Literal["message"] = "message"
    """``message``, or left out."""
    role: Literal["user", "assistant", "system", "developer"]
    """Who speaks."""
    content: str | list[TextPart]
    """The text, whole or in parts."""


class CallItem(RequestBody):
    """What the model called."""

    type: Literal["function_call"]
    """``function_call``."""
    call_id: str
    """To which its output refers."""
    name: str
    """Of the function."""
    arguments: str
    """As JSON in a text."""


class CallOutputItem(RequestBody):
    """What came of a call."""

    type: Literal["function_call_output"]
    """``function_call_output``."""
    call_id: str
    """Of the call."""
    output: str | list[TextPart]
    """The text, whole or in parts."""


class SkippedItem(RequestBody):
    """What models of other servers thought: passed over."""

    type: Literal["reasoning"]
    """``reasoning``."""


def _kind(item: Any) -> str:
    kind = item.get("type", "message") if isinstance(item, dict) else getattr(item, "type", "message")
    return kind if isinstance(kind, str) else "message"


Item = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[CallItem, Tag("function_call")]
    | Annotated[CallOutputItem, Tag("function_call_output")]
    | Annotated[SkippedItem, Tag("reasoning")],
    Discriminator(_kind),
]


class ResponseTool(RequestBody):
    """Only functions are served."""

    type: Literal["function"]
    """``function``."""
    name: str = ToolName
    """Letters, digits and ``_.-``."""
    description: str | None = None
    """What it does, for the model."""
    parameters: dict[str, Any] | None = None
    """JSON schema of its arguments."""
    strict: bool | None = None
    """Arguments keep to the schema; where a call must come they do so anyway."""


class ResponseToolName(RequestBody):
    """The call of one tool."""

    type: Literal["function"]
    """``function``."""
    name: str = ToolName
    """Its name."""

    def named(self) -> dict[str, Any]:
        """As chat completions have it."""
        return {"type": self.type, "function": {"name": self.name}}


class ResponseAllowedTools(RequestBody):
    """The call of some of the tools."""

    type: Literal["allowed_tools"]
    """``allowed_tools``."""
    mode: Literal["auto", "required"]
    """``auto``: the model decides; ``required``: the answer is one call or several."""
    tools: list[ResponseToolName] = Field(min_length=1)
    """Which ones."""


ResponseToolChoice = Annotated[ResponseToolName | ResponseAllowedTools, Field(discriminator="type")]


class TextFormat(RequestBody):
    """The form of the text."""

    type: Literal["text", "json_object", "json_schema"]
    """``text``, ``json_object`` or ``json_schema``."""
    name: str | None = None
    """Of the schema."""
    description: str | None = None
    """Accepted and not used."""
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    """With ``json_schema``."""
    strict: bool | None = None
    """Accepted: the text always keeps to the schema."""

    def response_format(self) -> dict[str, Any]:
        """As chat completions have it."""
        if self.type != "json_schema":
            return {"type": self.type}
        return {"type": self.type, "json_schema": {"name": self.name or "output", "schema": self.schema_}}


class TextOptions(RequestBody):
    """How the text is to be."""

    format: TextFormat | None = None
    """Default: any text."""
    verbosity: str | None = None
    """Accepted and not used."""


class Reasoning(RequestBody):
    """How the model is to think."""

    effort: str | None = None
    """Passed on to the chat template."""


class ResponseRequest(RequestBody):
    """OpenAI's request for a response. Nothing is stored: a conversation comes whole each time."""

    model: str | None = None
    """Name of a served model; without it, the only one."""
    input: str | list[Item]
    """A user's text, or the conversation."""
    instructions: str | None = None
    """The system's message before it."""
    max_output_tokens: int | None = Field(None, ge=1)
    """Most tokens to generate; by default as many as the context holds."""
    temperature: float | None = None
    """0 is greedy. Default 1."""
    top_p: float | None = None
    """Sample from the smallest set of tokens with this probability. Default 1."""
    text: TextOptions | None = None
    """The form of the text."""
    tools: list[ResponseTool] | None = None
    """Functions that the model may call."""
    tool_choice: Literal["none", "auto", "required"] | ResponseToolChoice | None = None
    """``none``, ``auto``, ``required``, the one to be called, or some of them."""
    parallel_tool_calls: bool | None = None
    """Whether there may be several calls. Default true."""
    stream: bool | None = None
    """Send server-sent events while tokens are generated."""
    reasoning: Reasoning | None = None
    """Its ``effort`` is a variable of the chat template."""
    include: list[str] | None = None
    """Only what there is none of: ``message.output_text.logprobs`` is not supported."""
    metadata: dict[str, str] | None = None
    """Comes back with the response."""
    user: str | None = None
    """Accepted and not used."""
    store: bool | None = None
    """Accepted: nothing is stored, as with false."""
    truncation: Literal["auto", "disabled"] | None = None
    """``auto`` cuts the beginning of a conversation that is too long."""
    previous_response_id: str | None = None
    """Not supported: nothing is stored."""
    conversation: str | dict[str, Any] | None = None
    """Not supported: nothing is stored."""
    background: bool | None = None
    """Not supported."""
    prompt: dict[str, Any] | None = None
    """Not supported: nothing is stored."""
    top_logprobs: int | None = None
    """Not supported."""

    seed: int | None = None
    """The same seed and parameters draw the same tokens."""
    top_k: int | None = None
    """Sample from the k likeliest tokens; 0 and -1 switch it off."""
    priority: int | None = None
    """Lower runs first."""
    request_id: str | None = None
    """Used in the response's id."""
    cache_salt: str | None = None
    """Cached prefixes are shared only between requests with the same salt."""
    session_id: str | None = None
    """Requests of a session go to the same replica if it can take them."""

    def refuse_unsupported(self) -> None:
        """Raise InvalidRequestError for what is known and cannot be served."""
        for name in ("previous_response_id", "conversation", "prompt"):
            if getattr(self, name) is not None:
                reason = f"{name} is not supported: this server stores nothing; send the conversation in input"
                raise InvalidRequestError(reason, param=name)
        for name in ("background", "top_logprobs"):
            if getattr(self, name):
                raise InvalidRequestError(f"{name} is not supported by this server", param=name)
        if _LOGPROBS in (self.include or ()):
            raise InvalidRequestError(f"{_LOGPROBS} is not supported by this server", param="include")

    def as_chat(self) -> dict[str, Any]:
        """The fields of the chat request that says the same. Raises InvalidRequestError."""
        fields: dict[str, Any] = {
            "messages": self._messages(),
            "max_completion_tokens": self.max_output_tokens,
            "tools": [
                {"type": "function", "function": tool.model_dump(exclude={"type"}, exclude_none=True)}
                for tool in self.tools or ()
            ],
            "tool_choice": self.tool_choice,
            "truncate_prompt_tokens": -1 if self.truncation == "auto" else None,
            "reasoning_effort": None if self.reasoning is None else self.reasoning.effort,
        }
        choice = self.tool_choice
        if isinstance(choice, ResponseToolName):
            fields["tool_choice"] = choice.named()
        elif isinstance(choice, ResponseAllowedTools):
            allowed = {"mode": choice.mode, "tools": [tool.named() for tool in choice.tools]}
            fields["tool_choice"] = {"type": "allowed_tools", "allowed_tools": allowed}
        if self.text is not None and self.text.format is not None:
            fields["response_format"] = self.text.format.response_format()
        shared = (ChatCompletionRequest.model_fields.keys() & ResponseRequest.model_fields.keys()) - fields.keys()
        fields |= {name: getattr(self, name) for name in shared}
        return {name: value for name, value in fields.items() if value is not None}

    def _messages(self) -> list[dict[str, Any]]:
        messages: list[dict[str, Any]] = []
        if self.instructions is not None:
            messages.append({"role": "system", "content": self.instructions})
        if isinstance(self.input, str):
            return [*messages, {"role": "user", "content": self.input}]
        for index, item in enumerate(self.input):
            self._add(item, f"input.{index}", messages)
        if not messages:
            raise InvalidRequestError("input must not be empty", param="input")
        return messages

    def _add(self, item: Item, path: str, messages: list[dict[str, Any]]) -> None:
        match item:
            case MessageItem():
                messages.append({"role": item.role, "content": _text(item.content, f"{path}.content")})
            case CallOutputItem():
                content = _text(item.output, f"{path}.output")
                messages.append({"role": "tool", "content": content, "tool_call_id": item.call_id})
            case CallItem():
                function = {"name": item.name, "arguments": item.arguments}
                call = {"id": item.call_id, "type": "function", "function": function}
                if messages and messages[-1]["role"] == "assistant":  # one turn says something and calls
                    messages[-1].setdefault("tool_calls", []).append(call)
                else:
                    messages.append({"role": "assistant", "tool_calls": [call]})
            case SkippedItem():
                pass


def _text(content: str | list[TextPart], path: str) -> str:
    if isinstance(content, str):
        return content
    for index, part in enumerate(content):
        if part.type not in ("input_text", "output_text", "text") or part.text is None:
            reason = f"content parts of type '{part.type[:40]}' are not supported by this server: only text is"
            raise InvalidRequestError(reason, param=f"{path}.{index}.type")
    return "\n".join(part.text or "" for part in content)
