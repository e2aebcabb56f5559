"""Text in, text out, over any source of tokens: what the OpenAI API and the client handles both stand on."""

import secrets
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from ..cluster.errors import InvalidRequestError
from ..cluster.ids import RequestId
from ..cluster.messages import GenerateRequest
from ..cluster.sampling_params import SamplingParams
from .chat_template import ChatTemplate, Message
from .choice import ChoiceWriter, run_choice
from .generator import TokenGenerator
from .merge import merge
from .output import OutputCollector, OutputDelta, RequestOutput
from .request_checks import check_params, check_priority, engine_params, packed_prompt
from .stop import StopStrings
from .tokenizer import Tokenizer
from .tool_formats import tool_format_of

_NUM_SEEDS = 2**64


class Frontend:
    """One served model, as text.

    ``vocab_size`` is the model's where it differs from the tokenizer's. ``clock`` is wall time in seconds.
    ``timeout_s`` is the time limit of requests that bring none, ``tool_call_parser`` the name of a ``ToolFormat``.
    """

    def __init__(
        self,
        generator: TokenGenerator,
        tokenizer: Tokenizer,
        *,
        model: str,
        max_model_len: int,
        vocab_size: int | None = None,
        clock: Callable[[], float] = time.time,
        new_seed: Callable[[], int] = lambda: secrets.randbits(63),
        new_id: Callable[[], str] = lambda: uuid.uuid4().hex,
        timeout_s: float | None = None,
        tool_call_parser: str = "auto",
    ) -> None:
        self.tokenizer = tokenizer
        self.model = model
        self.max_model_len = max_model_len
        self.vocab_size = tokenizer.vocab_size if vocab_size is None else vocab_size
        self._generator = generator
        self._clock = clock
        self._new_seed = new_seed
        self._new_id = new_id
        self._timeout_s = timeout_s
        self.tool_format = tool_format_of(tool_call_parser, tokenizer.chat_template)
        self._template = None
        if tokenizer.chat_template is not None:
            self._template = ChatTemplate(
                tokenizer.chat_template, tokenizer.special_tokens, now=lambda: datetime.fromtimestamp(clock())
            )

    def tokenize(self, prompt: str | list[int], *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text; ids pass as they are."""
        return self.tokenizer.encode(prompt, add_special_tokens) if isinstance(prompt, str) else prompt

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        add_special_tokens: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Token ids of a conversation, by the model's chat template. Raises InvalidRequestError."""
        if self._template is None:
            reason = f"model {self.model} has no chat template: use completions, or start it with --chat-template"
            raise InvalidRequestError(reason, param="messages")
        if not self._template.takes_tools:
            messages, tools = self.tool_format.plain(messages, tools or ()), None
        text = self._template.render(
            messages,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            documents=documents,
            variables=chat_template_kwargs,
        )
        return self.tokenizer.encode(text, add_special_tokens)

    def stream(
        self,
        prompt_token_ids: list[int],
        params: SamplingParams,
        *,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str = "",
        session_id: str = "",
        tenant: str = "",
        share: float = 1.0,
        timeout_s: float | None = None,
        admitted: bool = False,
        company_tokens: int = 0,
        trace: str = "",
    ) -> AsyncGenerator[OutputDelta, None]:
        """Deltas of all ``n`` choices as they come; closing it aborts them.

        ``tenant`` and ``share``: see ``GenerateRequest``. ``timeout_s``: seconds after which DeadlineExceededError is
        raised, at once if it is clear that they will not do. For the rest see ``GenerateRequest``.
        Raises InvalidRequestError and ContextTooLongError at once, and what the cluster raises when it is iterated.
        """
        if params.best_of is not None and params.best_of > params.n:
            raise InvalidRequestError("best_of greater than n cannot be streamed", param="best_of")
        options = _Options(
            request_id, priority, cache_salt, session_id, tenant, share, timeout_s, admitted, company_tokens, trace
        )
        return self._run(prompt_token_ids, params, options)

    async def generate(
        self,
        prompt_token_ids: list[int],
        params: SamplingParams,
        *,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str = "",
        session_id: str = "",
        tenant: str = "",
        share: float = 1.0,
        timeout_s: float | None = None,
    ) -> RequestOutput:
        """The whole output. ``best_of`` generates so many choices and returns the ``n`` likeliest."""
        request_id = request_id or self._new_id()
        options = _Options(request_id, priority, cache_salt, session_id, tenant, share, timeout_s)
        num_choices = params.best_of or params.n
        ranked = num_choices > params.n and params.logprobs is None
        wide = replace(params, n=num_choices, best_of=None, logprobs=0 if ranked else params.logprobs)
        collector = OutputCollector(num_choices)
        run = self._run(prompt_token_ids, wide, options)
        async with aclosing(run) as deltas:
            async for delta in deltas:
                collector.add(delta)
        output = collector.finish(RequestId(request_id), prompt_token_ids, params.n)
        return output.without_logprobs() if ranked else output

    def _run(self, prompt: list[int], params: SamplingParams, options: "_Options") -> AsyncGenerator[OutputDelta, None]:
        packed = packed_prompt(prompt, self.vocab_size)
        check_params(params, self.vocab_size)
        check_priority(options.priority)
        seed = self._new_seed() if params.seed is None else params.seed
        single = engine_params(params, self.tokenizer, len(prompt), self.max_model_len, seed)
        stops = StopStrings(params.stop) if params.stop else None
        request_id = options.request_id or self._new_id()
        now, limit = self._clock(), self._timeout_s if options.timeout_s is None else options.timeout_s
        choices: list[AsyncGenerator[OutputDelta, None]] = []
        for index in range(params.n):
            request = GenerateRequest(
                request_id=RequestId(f"{request_id}/{index}" if index else request_id),
                prompt_token_ids=prompt,
                params=replace(single, seed=_shifted(seed, index)) if index else single,
                priority=options.priority,
                cache_salt=options.cache_salt,
                arrival=now,
                tenant=options.tenant,
                share=options.share,
                deadline=0.0 if limit is None else now + limit,
                packed_prompt=packed,
                session=options.session_id,
                admitted=options.admitted or index > 0,
                company_tokens=options.company_tokens if index == 0 else 0,
                trace=options.trace,
            )
            writer = ChoiceWriter(index, self.tokenizer, params, stops, len(prompt))
            choices.append(run_choice(self._generator, request, writer))
        return choices[0] if len(choices) == 1 else merge(choices)


@dataclass(frozen=True, slots=True)
class _Options:
    """What ``stream`` and ``generate`` are told beside the prompt and how to sample."""

    request_id: str | None
    priority: int
    cache_salt: str
    session_id: str
    tenant: str
    share: float
    timeout_s: float | None
    admitted: bool = False
    company_tokens: int = 0
    trace: str = ""


def _shifted(seed: int, index: int) -> int:
    """Each choice draws for itself, and the seeds stay within 64 bits."""
    shifted = seed + index
    return shifted - _NUM_SEEDS if shifted >= _NUM_SEEDS else shifted
