"""Tools in requests and in answers, and what a request's choice among them means."""

import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal

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


class AllowedTools(RequestBody):
    """Some of the tools."""

    mode: Literal["auto", "required"]
    """``auto``: the model decides; ``required``: the answer is one call or several."""
    tools: list[NamedTool] = Field(min_length=1)
    """Which ones."""


class AllowedChoice(RequestBody):
    """The call of some of the tools."""

    type: Literal["allowed_tools"]
    """``allowed_tools``."""
    allowed_tools: AllowedTools
    """Which ones, and whether one has to be called."""


ToolChoice = Literal["none", "auto", "required"] | Annotated[NamedTool | AllowedChoice, Field(discriminator="type")]


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
    """Those that may be called: none of them with ``none``, else those that are named. Raises InvalidRequestError."""
    if choice == "none":
        return []
    if not tools and choice not in (None, "auto"):
        raise InvalidRequestError("tool_choice needs tools", param="tool_choice")
    if isinstance(choice, NamedTool):
        return [_named(tools, choice, "tool_choice")]
    if isinstance(choice, AllowedChoice):
        path = "tool_choice.allowed_tools.tools"
        return [_named(tools, one, f"{path}.{index}") for index, one in enumerate(choice.allowed_tools.tools)]
    return list(tools)


def _named(tools: Sequence[Tool], choice: NamedTool, path: str) -> Tool:
    for tool in tools:
        if tool.function.name == choice.function.name:
            return tool
    reason = f"tool_choice names {choice.function.name!r}, which is none of the tools"
    raise InvalidRequestError(reason, param=f"{path}.function.name")


def is_strict(tools: Sequence[Tool]) -> bool:
    """Whether the arguments of any of them have to keep to their schema."""
    return any(tool.function.strict for tool in tools)


def must_call(choice: ToolChoice | None) -> bool:
    """Whether the answer has to be a call."""
    if isinstance(choice, AllowedChoice):
        return choice.allowed_tools.mode == "required"
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
