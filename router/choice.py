"""One choice of a request: its tokens become text, up to a stop string."""

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from ..cluster.errors import DeadlineExceededError, EngineError, InvalidRequestError
from ..cluster.messages import FinishReason, GenerateRequest, TokenDelta, TokenLogprob
from ..cluster.sampling_params import SamplingParams
from .generator import TokenGenerator
from .output import DecodedLogprob, FinishWord, OutputDelta
from .stop import StopChecker, StopStrings
from .tokenizer import Tokenizer

_WORDS: dict[FinishReason, FinishWord] = {
    FinishReason.STOP: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.ABORT: "abort",
}


async def run_choice(
    generator: TokenGenerator, request: GenerateRequest, writer: "ChoiceWriter"
) -> AsyncGenerator[OutputDelta, None]:
    """Deltas of one sequence until it ends. Closing this, or a stop string, aborts it in the engine."""
    last: OutputDelta | None = None
    async with aclosing(generator.generate(request)) as deltas:
        async for delta in deltas:
            output = writer.write(delta)
            if output.finish_reason is None:
                yield output
                continue
            last = output
            if delta.finish_reason is None:
                break
    # Given out after the end of the source, so that a receiver who leaves now aborts nothing.
    if last is None:
        raise EngineError(f"request {request.request_id} ended without a finish reason")
    yield last


class ChoiceWriter:
    """Turns the deltas of one sequence into text. ``stops`` is the automaton of ``params.stop``, None without any."""

    def __init__(
        self,
        index: int,
        tokenizer: Tokenizer,
        params: SamplingParams,
        stops: StopStrings | None,
        num_prompt_tokens: int,
    ) -> None:
        self._index = index
        self._tokenizer = tokenizer
        self._detokenizer = tokenizer.detokenizer(params.skip_special_tokens)
        self._include = params.include_stop_str_in_output
        self._stop = None if stops is None else StopChecker(stops, include=self._include)
        self._min_tokens = params.min_tokens
        self._num_prompt_tokens = num_prompt_tokens
        self._num_tokens = 0

    def write(self, delta: TokenDelta) -> OutputDelta:
        """The next delta of the choice. Raises EngineError when the engine reports one, DeadlineExceededError when
        the request's time is up.
        """
        reason = delta.finish_reason
        if reason is not None and reason.is_failure:
            raise EngineError(delta.error or "the engine failed")
        if reason is FinishReason.REFUSED:
            raise InvalidRequestError(delta.error or "the request cannot be served")
        if reason is FinishReason.DEADLINE:
            raise DeadlineExceededError(delta.error or "the request's deadline passed")
        token_ids = delta.token_ids
        text, used = self._text(token_ids, reason)
        matched = None if self._stop is None else self._stop.matched
        if used < len(token_ids):
            token_ids = token_ids[:used]
        self._num_tokens += used
        return OutputDelta(
            index=self._index,
            text=text,
            token_ids=token_ids,
            logprobs=None if delta.logprobs is None else [self._decoded(entry) for entry in delta.logprobs[:used]],
            finish_reason="stop" if matched is not None else None if reason is None else _WORDS[reason],
            stop_reason=delta.stop_reason if matched is None else matched,
            cached_tokens=delta.cached_tokens,
            prompt_logprobs=self._prompt_logprobs(delta),
            embedding=delta.embedding,
            replica=delta.replica,
            report=delta.report,
            weights_version=delta.weights_version,
            num_prompt_tokens=self._num_prompt_tokens,
            num_output_tokens=self._num_tokens,
        )

    def _text(self, token_ids: list[int], reason: FinishReason | None) -> tuple[str, int]:
        """What to show, and the number of tokens up to a stop string."""
        # The token that ends an output is one of its tokens, but not a part of its text.
        shown = token_ids[:-1] if reason is FinishReason.STOP and not self._include else token_ids
        if self._stop is not None:
            return self._text_to_stop(self._stop, shown, len(token_ids), ends=reason is not None)
        text = self._detokenizer.push(shown)
        return (text if reason is None else text + self._detokenizer.flush()), len(token_ids)

    def _text_to_stop(self, stop: StopChecker, shown: Sequence[int], num_tokens: int, *, ends: bool) -> tuple[str, int]:
        text = ""
        for used, token_id in enumerate(shown, start=1):
            piece = self._detokenizer.push((token_id,))
            # Text of the first min_tokens tokens cannot end the output, nor begin the string that does.
            text += piece if self._num_tokens + used <= self._min_tokens else stop.push(piece)
            if stop.matched is not None:
                return text, used
        if ends:
            text += stop.push(self._detokenizer.flush())
            text += stop.flush()
        return text, num_tokens

    def _decoded(self, entry: TokenLogprob) -> DecodedLogprob:
        text_of = self._tokenizer.token_text
        return DecodedLogprob(
            entry.token_id,
            entry.logprob,
            entry.rank,
            entry.top,
            text_of(entry.token_id),
            self._tokenizer.token_bytes(entry.token_id),
            tuple(text_of(token_id) for token_id, _ in entry.top),
        )

    def _prompt_logprobs(self, delta: TokenDelta) -> list[DecodedLogprob | None] | None:
        if delta.prompt_logprobs is None:
            return None
        return [None if entry is None else self._decoded(entry) for entry in delta.prompt_logprobs]
