"""What a format of the weights does to the model: perplexity and argmax agreement on a fixed text."""

import hashlib
import math
from collections.abc import Callable
from pydoc_data.topics import topics
from typing import Any, NamedTuple

from .contender import Contender


class QualitySizes(NamedTuple):
    """Windows of the text, each scored from its beginning on."""

    num_windows: int
    window: int
    """Tokens."""


class Scores(NamedTuple):
    """One entry per token, all windows in a row."""

    logprobs: list[float]
    argmax: list[int]

    @property
    def perplexity(self) -> float:
        """Exponential of the mean negative log-likelihood."""
        return math.exp(-sum(self.logprobs) / len(self.logprobs))


def sample_text() -> str:
    """Python's own language reference, which comes with every Python (the text differs a little between versions)."""
    return "\n".join(topics[name] for name in sorted(topics))


def windows(encode: Callable[[str], list[int]], sizes: QualitySizes) -> list[list[int]]:
    """Consecutive windows of the text, as token ids."""
    # No token is longer than a few dozen characters; what is encoded is more than what is needed.
    tokens = encode(sample_text()[: 16 * sizes.num_windows * sizes.window])
    return [tokens[start : start + sizes.window] for start in range(0, sizes.num_windows * sizes.window, sizes.window)]


def text_facts(prompts: list[list[int]]) -> dict[str, Any]:
    """What was scored."""
    text = sample_text()
    return {
        "text": "pydoc_data.topics",
        "sha256": hashlib.sha256(text.encode()).hexdigest()[:16],
        "tokens": sum(len(prompt) - 1 for prompt in prompts),
        "window": len(prompts[0]),
    }


def score(contender: Contender, prompts: list[list[int]]) -> Scores:
    """Teacher-forced, window by window."""
    answers = [contender.call("score", prompt=prompt) for prompt in prompts]
    return Scores(
        [value for answer in answers for value in answer["logprobs"]],
        [token for answer in answers for token in answer["argmax"]],
    )


def compare(scores: Scores, reference: Scores) -> dict[str, float]:
    """Against the same tokens scored by another."""
    agreed = sum(ours == theirs for ours, theirs in zip(scores.argmax, reference.argmax, strict=True))
    return {
        "perplexity": scores.perplexity,
        "perplexity_ratio": scores.perplexity / reference.perplexity,
        "argmax_agreement": agreed / len(reference.argmax),
        "max_logprob_difference": max(
            abs(ours - theirs) for ours, theirs in zip(scores.logprobs, reference.logprobs, strict=True)
        ),
    }
