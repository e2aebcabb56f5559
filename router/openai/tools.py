"""Tools in requests and in answers, and what a request's choice among them means."""

import json
from collections.abc import Sequence
from typing import Any, Literal

from pydantic import Field

from ...cluster.errors import InvalidRequestError
from ...cluster.output_grammar import OutputGrammar
from ..tool_formats import ToolFormat
from .bodies import RequestBody, ResponseBody
from .output_format import AskedGrammar

ToolName = Field(pattern=r"^[A-Za-z0-9_.\-]{1,128}$")


class FunctionDefinition(RequestBody):
    """A function that the model may call."""

    name: str = ToolName
    """Letters, digits and ``_.-``."""
    description: str | None = None
    """What it does, for the model."""
    parameters: dict[str, Any] | None = None
    """JSON schema of its arguments; without it, any object."""
    strict: bool | None = None
    """Arguments keep to the schema; where a call must come they do so anyway."""


class Tool(RequestBody):
    """Only functions are served."""

    type: Literal["function"]
    """``function``."""
    function: FunctionDefinition
    """The function."""


class FunctionName(RequestBody):
    """The name of one of the tools."""

    name: str = ToolName
    """Its name."""


class NamedTool(RequestBody):
    """The call of one tool."""

    type: Literal["function"]
    """``function``."""
    function: FunctionName
    """Which one."""


ToolChoice = Literal["none", "auto", "required"] | NamedTool


class CalledFunction(RequestBody):
    """A function that was called."""

    name: str
    """Its name."""
    arguments: str
    """Its arguments, as JSON in a text."""


class PastCall(RequestBody):
    """A call in the assistant's turn of a conversation."""

    id: str | None = None
    """To which the ``tool_call_id`` of the answer refers."""
    type: Literal["function"] = "function"
    """``function``."""
    function: CalledFunction
    """What was called."""

    def for_template(self) -> dict[str, Any]:
        """As templates read it: with arguments as they were before they were written."""
        try:
            arguments = json.loads(self.function.arguments)
        except (ValueError, RecursionError):
            arguments = self.function.arguments
        function = {"name": self.function.name, "arguments": arguments}
        return {"id": self.id, "type": self.type, "function": function}


class FunctionCallBody(ResponseBody):
    """What the model calls."""

    name: str
    arguments: str
    """JSON as the model wrote it."""


class ToolCallBody(ResponseBody):
    """A call in an answer."""

    id: str
    type: Literal["function"] = "function"
    function: FunctionCallBody


class FunctionCallDelta(ResponseBody):
    """The name once, then arguments piece by piece."""

    name: str | None = None
    arguments: str | None = None


class ToolCallDelta(ResponseBody):
    """What a chunk adds to a call."""

    index: int
    id: str | None = None
    type: Literal["function"] | None = None
    function: FunctionCallDelta


def chosen_tools(tools: Sequence[Tool], choice: ToolChoice | None) -> list[Tool]:
    """Those that may be called: none of them with ``none``, one with a name. Raises InvalidRequestError."""
    if choice == "none":
        return []
    if not tools and choice not in (None, "auto"):
        raise InvalidRequestError("tool_choice needs tools", param="tool_choice")
    if not isinstance(choice, NamedTool):
        return list(tools)
    named = [tool for tool in tools if tool.function.name == choice.function.name]
    if not named:
        reason = f"tool_choice names {choice.function.name[:64]!r}, which is none of the tools"
        raise InvalidRequestError(reason, param="tool_choice.function.name")
    return named[:1]


def is_strict(tools: Sequence[Tool]) -> bool:
    """Whether the arguments of any of them have to keep to their schema."""
    return any(tool.function.strict for tool in tools)


def must_call(choice: ToolChoice | None) -> bool:
    """Whether the answer has to be a call."""
    return choice == "required" or isinstance(choice, NamedTool)


def asked_calls(
    tools: Sequence[Tool], form: ToolFormat, *, must_call: bool, parallel: bool, is_token: bool
) -> tuple[list[AskedGrammar], AskedGrammar]:
    """(the schemas of the tools' arguments, the form of an answer that consists of calls, or may have some)."""
    schemas = [
        AskedGrammar(OutputGrammar.json_schema(tool.function.parameters), f"tools.{index}.function.parameters")
        for index, tool in enumerate(tools)
        if tool.function.parameters is not None
    ]
    functions = [tool.model_dump(exclude_none=True) for tool in tools]
    grammar = form.grammar(functions, must_call=must_call, parallel=parallel, is_token=is_token)
    return schemas, AskedGrammar(grammar, "tools")
