"""Messages to prompt text, by the model's Jinja template, as transformers' ``apply_chat_template`` renders it."""

import json
from collections.abc import Callable, Mapping, Sequence, Sized
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
from jinja2 import meta, nodes
from jinja2.exceptions import SecurityError
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from ..cluster.errors import ConfigError, InvalidRequestError

_LONGEST_PRODUCT = 1_000_000
"""Characters or items that an expression such as ``' ' * 20`` may make."""
_CONTINUE_HERE = "CONTINUE_FINAL_MESSAGE_TAG "

Message = Mapping[str, Any]


class ChatTemplate:
    """A compiled template. ``special_tokens`` are its variables of that name; ``now`` is the clock it may read."""

    def __init__(self, source: str, special_tokens: Mapping[str, str], now: Callable[[], datetime]) -> None:
        environment = _environment(now)
        try:
            self._template = environment.from_string(source)
            self.takes_tools = "tools" in meta.find_undeclared_variables(environment.parse(source))
            """Whether it tells the model of tools by itself."""
        except jinja2.TemplateError as error:
            raise ConfigError(f"the chat template cannot be compiled: {error}", param="--chat-template") from error
        # A chain of dicts, which every rendering would flatten again.
        self._template.globals = dict(self._template.globals)
        self._special_tokens = dict(special_tokens)

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt. Contents that are lists of text parts become one text.

        ``continue_final_message`` ends the prompt where the last message ends. Raises InvalidRequestError
        (``messages``) when the template refuses them.
        """
        if not messages:
            raise InvalidRequestError("messages must not be empty", param="messages")
        if continue_final_message and add_generation_prompt:
            reason = "add_generation_prompt and continue_final_message exclude each other"
            raise InvalidRequestError(reason, param="continue_final_message")
        plain = [_plain(message) for message in messages]
        if continue_final_message:
            plain[-1]["content"] = plain[-1].get("content", "") + _CONTINUE_HERE
        values = {**self._special_tokens, **(variables or {})}
        values |= {"messages": plain, "tools": tools or None, "documents": documents or None}
        text = self._render({**values, "add_generation_prompt": add_generation_prompt})
        return _cut(text) if continue_final_message else text

    def _render(self, values: dict[str, Any]) -> str:
        try:
            return self._template.render(values)
        except jinja2.TemplateError as error:
            raise InvalidRequestError(f"the chat template refused: {error}", param="messages") from error
        except Exception as error:  # a template is a program: wrong messages make it fail in any way
            reason = f"the chat template failed on these messages: {type(error).__name__}: {error}"
            raise InvalidRequestError(reason, param="messages") from error


def _plain(message: Message) -> dict[str, Any]:
    """Without absent fields, which templates would print as None."""
    values = {key: value for key, value in message.items() if value is not None}
    if isinstance(values.get("content"), list):
        values["content"] = "\n".join(_part_text(part) for part in values["content"])
    return values


def _part_text(part: Any) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, Mapping) and part.get("type", "text") == "text" and isinstance(part.get("text"), str):
        return part["text"]
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    raise InvalidRequestError(f"content parts of type {kind!r} are not supported: only text is", param="messages")


def _cut(text: str) -> str:
    """Up to the end of the last message, which the template may have trimmed."""
    end = text.rfind(_CONTINUE_HERE.strip())
    if end < 0:
        raise InvalidRequestError("the chat template does not show the final message", param="messages")
    trimmed = not text.startswith(_CONTINUE_HERE, end)
    return text[:end].rstrip() if trimmed else text[:end]


class _Sandbox(ImmutableSandboxedEnvironment):
    """Jinja's sandbox bounds ``range``; this one bounds what ``*`` makes, too, and knows no powers."""

    intercepted_binops = frozenset({"*", "**"})

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """See jinja2."""
        if operator == "**":
            raise SecurityError("powers are not allowed in chat templates")
        for whole, times in ((left, right), (right, left)):
            if isinstance(whole, Sized) and isinstance(times, int) and len(whole) * times > _LONGEST_PRODUCT:
                raise SecurityError(f"a text or list repeated {times} times is too long")
        return super().call_binop(context, operator, left, right)


def _environment(now: Callable[[], datetime]) -> ImmutableSandboxedEnvironment:
    extensions = [_GenerationBlocks, jinja2.ext.loopcontrols]
    environment = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda layout: now().strftime(layout)
    return environment


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own escapes HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


class _GenerationBlocks(jinja2.ext.Extension):
    """``{% generation %}`` marks what the assistant wrote, for training: here it is only its content."""

    tags = {"generation"}  # noqa: RUF012 (declared so by jinja2)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)
