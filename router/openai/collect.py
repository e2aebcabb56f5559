"""Deltas put together again, for responses that are sent whole."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ...cluster.messages import FinishReason, TokenLogprob

if TYPE_CHECKING:
    from ..frontend import OutputDelta


@dataclass(slots=True)
class Collected:
    """One choice, growing delta by delta."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list[int])
    logprobs: list[TokenLogprob] = field(default_factory=list[TokenLogprob])
    prompt_logprobs: list[TokenLogprob | None] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None

    def add(self, delta: "OutputDelta") -> None:
        """Append one delta."""
        self.text += delta.text
        self.token_ids += delta.token_ids
        self.logprobs += delta.logprobs or ()
        if delta.prompt_logprobs is not None:
            self.prompt_logprobs = delta.prompt_logprobs
        if delta.finish_reason is not None:
            self.finish_reason, self.stop_reason = delta.finish_reason, delta.stop_reason

    @property
    def mean_logprob(self) -> float:
        """By which ``best_of`` ranks: longer choices are not at a disadvantage."""
        return sum(entry.logprob for entry in self.logprobs) / max(1, len(self.logprobs))


def best(choices: list[Collected], n: int) -> list[Collected]:
    """The ``n`` likeliest choices, likeliest first; in their own order when nobody is left out."""
    if len(choices) <= n:
        return choices
    return sorted(choices, key=lambda choice: choice.mean_logprob, reverse=True)[:n]
