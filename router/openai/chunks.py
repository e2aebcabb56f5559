"""Server-sent events, written by hand: per token an f-string instead of a model and a serialiser."""

import json
from dataclasses import dataclass, field
from json.encoder import encode_basestring
from typing import Any

from ..output import OutputDelta
from .feed import Arrival
from .logprobs import LogprobFormat
from .protocol import Usage

DONE = "data: [DONE]\n\n"
KEEP_ALIVE = ": keep-alive\n\n"

# Some clients split lines at these too, though the SSE standard does not.
_LINE_ENDS = {0x85: "\\u0085", 0x2028: "\\u2028", 0x2029: "\\u2029"}


def json_text(text: str) -> str:
    """``text`` as a JSON string in UTF-8, without any character that a client could take for a line end."""
    encoded = encode_basestring(text)
    return encoded if encoded.isascii() else encoded.translate(_LINE_ENDS)


def compact(value: Any) -> str:
    """JSON without spaces."""
    return json.dumps(value, separators=(",", ":"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Envelope:
    """What every body of one response repeats."""

    id: str
    created: int
    model: str
    fingerprint: str

    def fields(self, object_: str) -> dict[str, Any]:
        """The fields before the choices."""
        return {
            "id": self.id,
            "object": object_,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
        }

    def head(self, object_: str) -> str:
        """The opening of a chunk, up to its choices."""
        return f'data: {compact(self.fields(object_))[:-1]},"choices":['


@dataclass(slots=True)
class UsageCounter:
    """Adds up the tokens of one request while its deltas pass."""

    prompt_tokens: int
    output_tokens: dict[tuple[int, int], int] = field(default_factory=dict[tuple[int, int], int])
    cached_tokens: dict[int, int] = field(default_factory=dict[int, int])
    weights_versions: dict[str, None] = field(default_factory=dict[str, None])

    def count(self, arrival: Arrival) -> None:
        """Take note of one delta."""
        prompt, delta = arrival
        self.output_tokens[prompt, delta.index] = delta.num_output_tokens
        if delta.cached_tokens is not None:
            self.cached_tokens.setdefault(prompt, delta.cached_tokens)
        if delta.weights_version is not None:
            self.weights_versions[delta.weights_version] = None

    def usage(self) -> Usage:
        """The usage so far."""
        return Usage(
            self.prompt_tokens,
            sum(self.output_tokens.values()),
            sum(self.cached_tokens.values()),
            tuple(self.weights_versions),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkOptions:
    """What a stream carries beside its text."""

    include_usage: bool = False
    continuous_usage: bool = False
    token_ids: bool = False
    logprobs: LogprobFormat | None = None


class ChunkWriter:
    """What the streams of both APIs share."""

    object: str

    def __init__(self, envelope: Envelope, options: ChunkOptions, usage: UsageCounter) -> None:
        self._head = envelope.head(self.object)
        self._options = options
        self._usage = usage
        self._tail = '],"usage":null}\n\n' if options.include_usage else "]}\n\n"

    def begin(self) -> str:
        """Events before the first delta."""
        return ""

    def write(self, arrival: Arrival) -> str:
        """The events of one delta; none when it has nothing to show yet."""
        self._usage.count(arrival)
        if self._options.continuous_usage:
            self._tail = self._usage_tail()
        return self._choice(arrival)

    def end(self) -> str:
        """Events after the last delta."""
        usage = f"{self._head}{self._usage_tail()}" if self._options.include_usage else ""
        return usage + DONE

    def fail(self, error: dict[str, Any]) -> str:
        """The event that ends a stream which cannot go on; ``error`` is the error's body."""
        return f"data: {compact(error)}\n\n"

    def _choice(self, arrival: Arrival) -> str:
        raise NotImplementedError

    def _usage_tail(self) -> str:
        return f'],"usage":{compact(self._usage.usage().body())}}}\n\n'

    def _ids(self, delta: OutputDelta) -> str:
        return f',"token_ids":{compact(delta.token_ids)}' if self._options.token_ids else ""


class ChatChunks(ChunkWriter):
    """Events of a chat completion: the role, the content piece by piece, and the finish reason alone."""

    object = "chat.completion.chunk"

    def __init__(
        self,
        envelope: Envelope,
        options: ChunkOptions,
        usage: UsageCounter,
        *,
        n: int,
        prompt_token_ids: list[int],
    ) -> None:
        super().__init__(envelope, options, usage)
        self._n = n
        self._prompt = f',"prompt_token_ids":{compact(prompt_token_ids)}' if options.token_ids else ""

    def begin(self) -> str:
        """The role of each choice."""
        delta = '"delta":{"role":"assistant","content":"","refusal":null},"logprobs":null,"finish_reason":null'
        tail = self._usage_tail() if self._options.continuous_usage else self._tail
        tail = f"]{self._prompt}{tail[1:]}"
        return "".join(f'{self._head}{{"index":{index},{delta}}}{tail}' for index in range(self._n))

    def _choice(self, arrival: Arrival) -> str:
        delta = arrival.delta
        events = ""
        if delta.text or self._has_extras(delta):
            events = self._event(delta, f'"content":{json_text(delta.text)}', self._logprobs(delta), self._ids(delta))
        if delta.finish_reason is not None:
            events += self._finish(delta, delta.finish_reason)
        return events

    def _has_extras(self, delta: OutputDelta) -> bool:
        return bool(delta.token_ids) and (self._options.logprobs is not None or self._options.token_ids)

    def _event(self, delta: OutputDelta, change: str, logprobs: str = "null", token_ids: str = "") -> str:
        return (
            f'{self._head}{{"index":{delta.index},"delta":{{{change}}},'
            f'"logprobs":{logprobs},"finish_reason":null{token_ids}}}{self._tail}'
        )

    def _finish(self, delta: OutputDelta, reason: str) -> str:
        return (
            f'{self._head}{{"index":{delta.index},"delta":{{}},"logprobs":null,'
            f'"finish_reason":"{reason}","stop_reason":{compact(delta.stop_reason)}}}{self._tail}'
        )

    def _logprobs(self, delta: OutputDelta) -> str:
        write = self._options.logprobs
        return "null" if write is None or delta.logprobs is None else compact(write.chat(delta.logprobs))


class CompletionChunks(ChunkWriter):
    """Events of a text completion; the last one of each choice has text and finish reason."""

    object = "text_completion"

    def __init__(
        self,
        envelope: Envelope,
        options: ChunkOptions,
        usage: UsageCounter,
        *,
        n: int,
        prompt_token_ids: list[list[int]],
        echo: list[str] | None,
    ) -> None:
        super().__init__(envelope, options, usage)
        self._n = n
        self._prompt_token_ids = prompt_token_ids
        self._echo = echo
        self._offsets: dict[int, int] = {}
        """Per choice that has begun, where its next token starts; counted with logprobs only."""

    def _choice(self, arrival: Arrival) -> str:
        prompt, delta = arrival
        options, index = self._options, prompt * self._n + delta.index
        first = index not in self._offsets
        echo = self._echo[prompt] if first and self._echo is not None else ""
        extras = delta.token_ids and (options.logprobs is not None or options.token_ids)
        if not (echo or delta.text or extras or delta.finish_reason is not None):
            return ""
        self._offsets.setdefault(index, 0)
        logprobs = "null" if options.logprobs is None else self._logprobs(options.logprobs, arrival, index, echo)
        reason = "null" if delta.finish_reason is None else f'"{delta.finish_reason}"'
        return (
            f'{self._head}{{"index":{index},"text":{json_text(echo + delta.text)},"logprobs":{logprobs},'
            f'"finish_reason":{reason},"stop_reason":{compact(delta.stop_reason)}'
            f"{self._prompt_ids(prompt) if first else ''}{self._ids(delta)}}}{self._tail}"
        )

    def _prompt_ids(self, prompt: int) -> str:
        if not self._options.token_ids:
            return ""
        return f',"prompt_token_ids":{compact(self._prompt_token_ids[prompt])}'

    def _logprobs(self, write: LogprobFormat, arrival: Arrival, index: int, echo: str) -> str:
        prompt, delta = arrival
        token_ids, logprobs, offset = delta.token_ids, delta.logprobs or [], self._offsets[index]
        if echo and delta.prompt_logprobs is not None:
            token_ids = [*self._prompt_token_ids[prompt], *token_ids]
            logprobs = [*delta.prompt_logprobs, *logprobs]
        else:
            offset += len(echo)
        self._offsets[index] = offset + sum(len(write.text(token_id)) for token_id in token_ids)
        return compact(write.completion(token_ids, logprobs, offset))
