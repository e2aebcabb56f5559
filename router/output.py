"""What a request gives back, as text: piece by piece, or whole."""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Literal

from ..cluster.ids import ReplicaId, RequestId
from ..cluster.messages import FirstTokenReport, TokenLogprob

FinishWord = Literal["stop", "length", "abort"]


@dataclass(frozen=True, slots=True)
class DecodedLogprob(TokenLogprob):
    """A log-probability with its tokens as text; bytes that are no whole character become U+FFFD."""

    token: str = ""
    token_bytes: bytes = b""
    """The token's UTF-8 bytes, maybe a part of a character."""
    top_tokens: tuple[str, ...] = ()
    """Texts of ``top``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputDelta:
    """News of one choice. Its text may lag behind its tokens: what may become a stop string is held back."""

    index: int = 0
    """Which of the request's choices."""
    text: str = ""
    token_ids: list[int] = field(default_factory=list[int])
    logprobs: list[DecodedLogprob] | None = None
    """One per token, where the request asks for them."""
    finish_reason: FinishWord | None = None
    """Set on the last delta of the choice."""
    stop_reason: str | int | None = None
    """The stop string or the id of the stop token that ended it; None for the end-of-text token."""
    cached_tokens: int | None = None
    """Prompt tokens whose KV was found, on the first delta."""
    prompt_logprobs: list[DecodedLogprob | None] | None = None
    """One per prompt token, on the first delta where the request asks for them."""
    replica: ReplicaId | None = None
    """Who computed it, on the first delta and after a move."""
    report: FirstTokenReport | None = None
    """Where the time before the first token went, on the first delta."""
    embedding: bytes | None = None
    """In place of an output, where it is asked for: float32, little-endian."""
    weights_version: str | None = None
    """Which weights it came from, on the first delta and whenever they have changed."""
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    """Of this choice so far."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """One finished choice."""

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[DecodedLogprob] | None
    finish_reason: FinishWord | None
    stop_reason: str | int | None

    @property
    def cumulative_logprob(self) -> float | None:
        """Of the whole choice, where the request asks for log-probabilities."""
        return None if self.logprobs is None else sum(entry.logprob for entry in self.logprobs)


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOutput:
    """A finished request."""

    request_id: RequestId
    prompt_token_ids: list[int]
    completions: list[Completion]
    prompt_logprobs: list[DecodedLogprob | None] | None
    embedding: bytes | None
    """Of the prompt, where it is asked for in place of an output: float32, little-endian."""
    replica: ReplicaId | None
    """Of the first choice."""
    cached_tokens: int
    """Prompt tokens whose KV the first choice found."""
    num_output_tokens: int
    """Of all choices that were generated, with ``best_of`` the dropped ones too."""
    weights_versions: tuple[str, ...] = ()
    """Weights that its tokens came from, in the order in which they were used: several where they have changed."""

    @property
    def first_weights(self) -> str | None:
        """The version of the weights that it began with."""
        return self.weights_versions[0] if self.weights_versions else None

    @property
    def num_prompt_tokens(self) -> int:
        """The prompt counts once, however many choices there are."""
        return len(self.prompt_token_ids)

    @property
    def text(self) -> str:
        """Of the first choice."""
        return self.completions[0].text

    def without_logprobs(self) -> "RequestOutput":
        """For a request that did not ask for them."""
        return replace(self, completions=[replace(completion, logprobs=None) for completion in self.completions])


class OutputCollector:
    """Puts deltas together again."""

    def __init__(self, num_choices: int) -> None:
        self._deltas: list[list[OutputDelta]] = [[] for _ in range(num_choices)]

    def add(self, delta: OutputDelta) -> None:
        """Take the next delta of any choice."""
        self._deltas[delta.index].append(delta)

    def finish(self, request_id: RequestId, prompt_token_ids: list[int], n: int) -> RequestOutput:
        """The request's output, with the ``n`` likeliest choices where there are more."""
        first = self._deltas[0][0]
        return RequestOutput(
            request_id=request_id,
            prompt_token_ids=prompt_token_ids,
            completions=_best([_completion(deltas) for deltas in self._deltas], n),
            prompt_logprobs=first.prompt_logprobs,
            embedding=self._deltas[0][-1].embedding,
            replica=first.replica,
            cached_tokens=first.cached_tokens or 0,
            num_output_tokens=sum(deltas[-1].num_output_tokens for deltas in self._deltas),
            weights_versions=distinct(delta.weights_version for deltas in self._deltas for delta in deltas),
        )


def distinct(versions: Iterable[str | None]) -> tuple[str, ...]:
    """Each of them once, in their order."""
    return tuple(dict.fromkeys(filter(None, versions)))


def _completion(deltas: list[OutputDelta]) -> Completion:
    last = deltas[-1]
    logprobs = [entry for delta in deltas for entry in delta.logprobs or ()]
    return Completion(
        index=last.index,
        text="".join(delta.text for delta in deltas),
        token_ids=[token_id for delta in deltas for token_id in delta.token_ids],
        logprobs=logprobs if any(delta.logprobs is not None for delta in deltas) else None,
        finish_reason=last.finish_reason,
        stop_reason=last.stop_reason,
    )


def _best(completions: list[Completion], n: int) -> list[Completion]:
    """By log-probability per token, as OpenAI's ``best_of``; renumbered."""
    if len(completions) <= n:
        return completions
    ranked = sorted(completions, key=_mean_logprob, reverse=True)[:n]
    return [replace(completion, index=index) for index, completion in enumerate(ranked)]


def _mean_logprob(completion: Completion) -> float:
    return (completion.cumulative_logprob or 0.0) / max(1, len(completion.token_ids))
