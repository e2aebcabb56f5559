"""How models write tool calls, by family: what their prompts say of tools, and what the calls look like.

``hermes`` is the format of Hermes, Qwen and SmolLM2, ``llama3_json`` that of Llama 3.1 and later.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..cluster.output_grammar import OutputGrammar
from .chat_template import Message

_MOST_CALLS = 16
"""In one answer that must be calls, or else a small model may never end."""
_TEXT = "TEXT: /(.|\\n)*/\nNO_CALL: /([^{](.|\\n)*)?/"
_SPACES = {"x-guidance": {"whitespace_pattern": "[ \\n]{1,2}"}}


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """A call is ``opens``, a JSON object with ``name`` and ``arguments_key``, ``closes``; calls have ``between``."""

    name: str
    opens: str
    """Without it, an answer is a call if it begins as one."""
    closes: str
    between: str
    arguments_key: str
    instructions: str
    """For templates that know nothing of tools; ``{tools}`` are their definitions, one a line."""

    def grammar(
        self, tools: Sequence[Mapping[str, Any]], *, must_call: bool = True, parallel: bool, is_token: bool
    ) -> OutputGrammar:
        """One call of these tools, or several; unless they ``must_call``, any text with such calls in it.

        ``is_token``: ``opens`` and ``closes`` are special tokens.
        """
        functions = [tool["function"] for tool in tools]
        schema = {"anyOf": [self._schema(*numbered) for numbered in enumerate(functions)], **_SPACES}
        opens, closes = (self._mark(mark, is_token=is_token) for mark in (self.opens, self.closes))
        more = f"({json.dumps(self.between)} call){{0,{_MOST_CALLS - 1}}}" if parallel else ""
        start, begin = f"call {more}", f"{opens} object"
        if not must_call:
            start, begin = self._among_text(start, is_token=is_token)
        rules = (f"start: {start}", f"call: {begin} {closes}", f"object: %json {json.dumps(schema)}", _TEXT)
        return OutputGrammar("lark", "\n".join(rules[: 3 if must_call else 4]))

    def _among_text(self, calls: str, *, is_token: bool) -> tuple[str, str]:
        """(the start, how a call begins) where calls stand among text."""
        if not self.opens:
            return f"{calls} | NO_CALL", "object"
        if is_token:
            return f"call{{0,{_MOST_CALLS}}} TEXT", f'TEXT {self.opens} "\\n" object'
        opening = f"opening[lazy]: TEXT {json.dumps(self.opens)}\n"
        return f"call{{0,{_MOST_CALLS}}} TEXT\n{opening}", 'opening "\\n" object'

    def plain(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> list[Message]:
        """The conversation for a template that knows nothing of tools: all is said in texts."""
        said = [self._plain_message(message) for message in messages]
        if not tools:
            return said
        listed = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
        text = self.instructions.replace("{tools}", listed)
        if said and said[0]["role"] == "system":
            return [{**said[0], "content": f"{said[0]['content']}\n\n{text}"}, *said[1:]]
        return [{"role": "system", "content": text}, *said]

    def _plain_message(self, message: Message) -> Message:
        if message["role"] == "tool":
            return {"role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}
        calls = message.get("tool_calls")
        if not calls:
            return message
        written = self.between.join(self._call(call["function"]) for call in calls)
        content = message.get("content")
        return {"role": message["role"], "content": f"{content}\n{written}" if content else written}

    def _call(self, function: Mapping[str, Any]) -> str:
        body = {"name": function["name"], self.arguments_key: function["arguments"]}
        lines = (self.opens, json.dumps(body, ensure_ascii=False), self.closes)
        return "\n".join(line for line in lines if line)

    def _schema(self, number: int, function: Mapping[str, Any]) -> dict[str, Any]:
        # A resource of its own: its ``#/$defs/…`` stay inside.
        arguments = {**(function.get("parameters") or {"type": "object"}), "$id": f"urn:tool:{number}"}
        return {
            "type": "object",
            "properties": {"name": {"const": function["name"]}, self.arguments_key: arguments},
            "required": ["name", self.arguments_key],
            "additionalProperties": False,
        }

    def _mark(self, mark: str, *, is_token: bool) -> str:
        """In Lark: with the line end between a mark and the object."""
        if not mark:
            return ""
        line_end = json.dumps("\n")
        written = mark if is_token else json.dumps(mark)
        return f"{line_end} {written}" if mark == self.closes else f"{written} {line_end}"


_HERMES = ToolFormat(
    name="hermes",
    opens="<tool_call>",
    closes="</tool_call>",
    between="\n",
    arguments_key="arguments",
    instructions=(
        "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
        "You are provided with function signatures within <tools></tools> XML tags:\n<tools>\n{tools}\n</tools>\n\n"
        "For each function call, return a json object with function name and arguments within "
        "<tool_call></tool_call> XML tags:\n<tool_call>\n"
        '{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>'
    ),
)
_LLAMA3 = ToolFormat(
    name="llama3_json",
    opens="",
    closes="",
    between="; ",
    arguments_key="parameters",
    instructions=(
        "You have access to the following functions. "
        "To call a function, please respond with JSON for a function call.\n"
        'Respond in the format {"name": function name, "parameters": dictionary of argument name and its value}.\n'
        "Do not use variables.\n\n{tools}"
    ),
)
TOOL_FORMATS = {found.name: found for found in (_HERMES, _LLAMA3)}
"""By name, as ``tool_call_parser`` has it."""


def tool_format_of(name: str, chat_template: str | None) -> ToolFormat:
    """The format of that name; ``auto`` looks at what the model's template writes."""
    if name != "auto":
        return TOOL_FORMATS[name]
    template = chat_template or ""
    is_llama = "<|python_tag|>" in template or "ipython" in template
    return _LLAMA3 if is_llama and _HERMES.opens not in template else _HERMES
