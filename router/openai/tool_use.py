"""How one chat request uses tools."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from ...cluster.sampling_params import SamplingParams
from ..frontend import Frontend
from ..tool_calls import ToolCallParser
from ..tool_formats import ToolFormat
from .chat import ChatCompletionRequest
from .output_format import only_one
from .service import Service
from .tool_chunks import finish_word, message_of
from .tools import Tool, asked_calls, is_strict, must_call


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolUse:
    """Of a request with tools that may be called."""

    body: ChatCompletionRequest
    tools: list[Tool]
    form: ToolFormat
    is_token: bool
    """Whether the marks around a call are special tokens of the model."""
    new_call_id: Callable[[], str]

    @classmethod
    def of(cls, body: ChatCompletionRequest, frontend: Frontend, new_id: Callable[[], str]) -> "ToolUse | None":
        """None: nothing can be called, for want of tools or because the answer is JSON. Raises InvalidRequestError."""
        tools, form, own = body.shown_tools(), frontend.tool_format, body.asked_grammar()
        is_json = own is not None and own.grammar.kind == "json_schema" and not must_call(body.tool_choice)
        if not tools or is_json:
            return None
        is_token = frontend.tokenizer.is_special(form.opens)
        return cls(body=body, tools=tools, form=form, is_token=is_token, new_call_id=lambda: f"call_{new_id()}")

    @property
    def parallel(self) -> bool:
        """Whether there may be several calls."""
        return self.body.parallel_tool_calls is not False

    async def applied(self, params: SamplingParams, service: Service) -> SamplingParams:
        """What the sampler is asked for. Raises InvalidRequestError."""
        if self.is_token:
            params = replace(params, skip_special_tokens=False)
        must, own, limits = must_call(self.body.tool_choice), self.body.asked_grammar(), service.settings.limits
        if not must and (own is not None or not is_strict(self.tools)):
            return params
        schemas, calls = asked_calls(
            self.tools, self.form, must_call=must, parallel=self.parallel, is_token=self.is_token
        )
        only_one([*filter(None, [own]), calls._replace(path="tool_choice")])
        for schema in schemas:
            await service.grammars.check(schema, limits)
        return await service.grammars.applied(params, calls, limits)

    def parser(self) -> ToolCallParser:
        """For one answer."""
        return ToolCallParser(self.form, None if self.parallel else 1)

    def answer(self, text: str, reason: str | None) -> tuple[dict[str, object], str | None]:
        """(message, finish reason) of a whole answer."""
        parser = self.parser()
        message = message_of(text, parser, self.new_call_id)
        return message, None if reason is None else finish_word(reason, parser)
