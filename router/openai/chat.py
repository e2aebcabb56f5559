"""Bodies of ``POST /v1/chat/completions``."""

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import Field

from ...cluster.errors import InvalidRequestError
from ...cluster.sampling_params import SamplingParams
from .bodies import RequestBody, ResponseBody
from .protocol import GenerationRequest, TopLogprobs, UsageBody
from .tools import PastCall, Tool, ToolCallBody, ToolCallDelta, ToolChoice, chosen_tools


class ContentPart(RequestBody):
    """One part of a message. Only text is served."""

    type: str
    """``text``."""
    text: str | None = None
    """The text of a ``text`` part."""


class ChatMessage(RequestBody):
    """One turn of the conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    """Who speaks. ``developer`` means ``system``; ``function``, which ``tool`` replaced, is not supported."""
    content: str | list[ContentPart] | None = None
    """The text, whole or in parts."""
    name: str | None = None
    """Passed on to the chat template."""
    tool_calls: list[PastCall] | None = None
    """What the assistant called in this turn."""
    tool_call_id: str | None = None
    """Which call a ``tool`` answers."""

    def for_template(self, path: str) -> dict[str, Any]:
        """The message as chat templates read it. Raises InvalidRequestError; ``path`` names it there."""
        if self.role == "function":
            raise InvalidRequestError("role 'function' is not supported by this server", param=f"{path}.role")
        if self.tool_calls and self.role != "assistant":
            raise InvalidRequestError("only the assistant calls tools", param=f"{path}.tool_calls")
        role = "system" if self.role == "developer" else self.role
        content = None if self.tool_calls and self.content is None else self._text(f"{path}.content")
        message: dict[str, Any] = {"role": role, "content": content, "name": self.name}
        if self.role == "tool":
            message["tool_call_id"] = self.tool_call_id
        if self.tool_calls:
            message["tool_calls"] = [call.for_template() for call in self.tool_calls]
        return {name: value for name, value in message.items() if value is not None}

    def texts(self) -> list[str]:
        """All text that it holds."""
        called = [call.function.arguments for call in self.tool_calls or ()]
        if isinstance(self.content, list):
            return [*called, *(part.text for part in self.content if part.text is not None)]
        return called if self.content is None else [*called, self.content]

    def _text(self, path: str) -> str:
        if isinstance(self.content, str):
            return self.content
        if self.content is None:
            raise InvalidRequestError("content must be a text or a list of text parts", param=path)
        for index, part in enumerate(self.content):
            if part.type != "text":
                reason = f"content parts of type '{part.type}' are not supported by this server"
                raise InvalidRequestError(reason, param=f"{path}.{index}.type")
            if part.text is None:
                raise InvalidRequestError("a text part needs a text", param=f"{path}.{index}.text")
        return "\n".join(part.text or "" for part in self.content)


class ChatTemplateOptions(RequestBody):
    """How messages become a prompt, for requests that carry ``messages``."""

    messages: list[ChatMessage] = Field(min_length=1)
    """The conversation, oldest turn first."""
    add_generation_prompt: bool | None = None
    """End the prompt with the opening of the assistant's turn. Default true, unless the last message goes on."""
    continue_final_message: bool = False
    """Leave the last message open, so that the output goes on with it."""
    add_special_tokens: bool = False
    """Add the tokenizer's special tokens to what the template wrote, which usually has them."""
    chat_template: str | None = None
    """Not supported: the template is the server's."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Variables for the chat template."""
    tools: list[Tool] | None = None
    """Functions that the model may call."""

    def shown_tools(self) -> list[Tool]:
        """Those that the model is told of."""
        return self.tools or []

    def messages_for_template(self) -> list[dict[str, Any]]:
        """The conversation as templates read it. Raises InvalidRequestError naming the part at fault."""
        return [message.for_template(f"messages.{index}") for index, message in enumerate(self.messages)]

    def render_options(self) -> dict[str, Any]:
        """Keyword arguments of ``Frontend.render``. Raises InvalidRequestError for a contradiction."""
        if self.chat_template is not None:
            raise InvalidRequestError("chat_template cannot be set by a request", param="chat_template")
        if self.continue_final_message and self.add_generation_prompt:
            reason = "add_generation_prompt and continue_final_message exclude each other"
            raise InvalidRequestError(reason, param="continue_final_message")
        opens = self.add_generation_prompt is not False and not self.continue_final_message
        return {
            "add_generation_prompt": opens,
            "continue_final_message": self.continue_final_message,
            "add_special_tokens": self.add_special_tokens,
            "chat_template_kwargs": self.chat_template_kwargs or {},
            "tools": [tool.model_dump(exclude_none=True) for tool in self.shown_tools()],
        }


class ChatCompletionRequest(GenerationRequest, ChatTemplateOptions):
    """OpenAI's chat completion request with vLLM's extensions."""

    max_completion_tokens: int | None = Field(None, ge=0)
    """Most tokens to generate; comes before ``max_tokens``."""
    logprobs: bool | None = None
    """Report the log-probability of each output token."""
    top_logprobs: int | None = TopLogprobs
    """Likeliest tokens to report at each position, 0 to 20; needs ``logprobs``."""
    reasoning_effort: str | None = None
    """Passed on to the chat template."""

    tool_choice: ToolChoice | None = None
    """``none``, ``auto``, ``required`` (the answer is one call or several), the one to be called, or some of them."""
    parallel_tool_calls: bool | None = None
    """Whether there may be several calls in an answer. Default true."""
    functions: list[Any] | None = None
    """Not supported."""
    function_call: str | dict[str, Any] | None = None
    """Only ``none`` and ``auto``."""
    modalities: list[str] | None = None
    """Only ``["text"]``."""
    audio: dict[str, Any] | None = None
    """Not supported."""
    web_search_options: dict[str, Any] | None = None
    """Not supported."""
    documents: list[Any] | None = None
    """Not supported."""
    echo: bool | None = None
    """Not supported."""
    mm_processor_kwargs: dict[str, Any] | None = None
    """Not supported."""

    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **GenerationRequest.unsupported,
        "functions": ([],),
        "function_call": ("none", "auto"),
        "modalities": (["text"],),
        "audio": (),
        "web_search_options": (),
        "documents": ([],),
        "echo": (False,),
        "mm_processor_kwargs": ({},),
    }

    def to_sampling_params(self) -> SamplingParams:
        """What the sampler is asked for. Raises InvalidRequestError naming the field at fault."""
        if self.top_logprobs is not None and not self.logprobs:
            raise InvalidRequestError("top_logprobs needs logprobs=true", param="top_logprobs")
        return self.sampling_params(
            max_tokens=self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens,
            logprobs=(self.top_logprobs or 0) if self.logprobs else None,
        )

    def shown_tools(self) -> list[Tool]:
        """Those that may be called. Raises InvalidRequestError."""
        return chosen_tools(self.tools or [], self.tool_choice)

    def render_options(self) -> dict[str, Any]:
        """Keyword arguments of ``Frontend.render``."""
        options = super().render_options()
        if self.reasoning_effort is not None:
            variables = {"reasoning_effort": self.reasoning_effort, **options["chat_template_kwargs"]}
            options["chat_template_kwargs"] = variables
        return options


class ChatTopLogprob(ResponseBody):
    """One of the likeliest tokens at a position."""

    token: str
    logprob: float
    bytes: list[int] | None
    """The token's UTF-8 bytes, which may be a part of a character."""


class ChatTokenLogprob(ChatTopLogprob):
    """The token at a position, and the likeliest ones."""

    top_logprobs: list[ChatTopLogprob]


class ChatLogprobs(ResponseBody):
    """Log-probabilities of a choice."""

    content: list[ChatTokenLogprob] | None
    refusal: None = None


class AssistantMessage(ResponseBody):
    """The answer."""

    role: Literal["assistant"] = "assistant"
    content: str | None
    """null where the answer consists of calls."""
    refusal: None = None
    tool_calls: list[ToolCallBody] | None = None


class ChatChoice(ResponseBody):
    """One completion."""

    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: str
    """``stop``, ``length``, ``tool_calls`` or ``abort``."""
    stop_reason: int | str | None = None
    """The stop text or token id that ended it."""
    token_ids: list[int] | None = None
    """With ``return_token_ids``."""


class ChatCompletion(ResponseBody):
    """The response without ``stream``."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    system_fingerprint: str | None = None
    choices: list[ChatChoice]
    usage: UsageBody
    prompt_logprobs: list[dict[str, Any] | None] | None = None
    prompt_token_ids: list[int] | None = None


class ChatDelta(ResponseBody):
    """What a chunk adds to the answer."""

    role: Literal["assistant"] | None = None
    content: str | None = None
    tool_calls: list[ToolCallDelta] | None = None


class ChatChunkChoice(ResponseBody):
    """What a chunk adds to one choice."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None


class ChatCompletionChunk(ResponseBody):
    """One event of the stream."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    system_fingerprint: str | None = None
    choices: list[ChatChunkChoice]
    usage: UsageBody | None = None
    prompt_token_ids: list[int] | None = None
