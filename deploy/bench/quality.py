"""What a format of the weights does to the model: perplexity and argmax agreement on a fixed text."""

import hashlib
import math
from collections.abc import Callable
from pydoc_data.topics import topics
from typing import Any, NamedTuple

from .contender import Contender

_NEAR_TIE = 0.01
"""Margin below which the reference itself hardly prefers one token."""


class QualitySizes(NamedTuple):
    """Windows of the text, each scored from its beginning on."""

    num_windows: int
    window: int
    """Tokens."""


class Scores(NamedTuple):
    """One entry per token, all windows in a row."""

    logprobs: list[float]
    """Of the token that stands there."""
    argmax: list[int]
    """The likeliest token."""
    margins: list[float]
    """Log-probability of the likeliest token less that of the second."""

    @property
    def perplexity(self) -> float:
        """Exponential of the mean negative log-likelihood."""
        return math.exp(-sum(self.logprobs) / len(self.logprobs))


def sample_text() -> str:
    """The prose of Python's own language reference: paragraphs of sentences, without code, grammar and headings.

    It comes with every Python and differs a little between versions.
    """
    paragraphs = (
        " ".join(text.split()) for name in sorted(topics) for text in topics[name].split("\n\n") if _is_prose(text)
    )
    return "\n\n".join(paragraphs)


def _is_prose(paragraph: str) -> bool:
    return len(paragraph) > 120 and paragraph[0].isalpha() and paragraph.endswith(".") and "::=" not in paragraph


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
    return Scores(**{name: [item for answer in answers for item in answer[name]] for name in Scores._fields})


def compare(scores: Scores, reference: Scores) -> dict[str, float]:
    """Against the same tokens scored by another."""
    agreed = [ours == theirs for ours, theirs in zip(scores.argmax, reference.argmax, strict=True)]
    clear = [same for same, margin in zip(agreed, reference.margins, strict=True) if margin >= _NEAR_TIE]
    return {
        "perplexity": scores.perplexity,
        "perplexity_ratio": scores.perplexity / reference.perplexity,
        "argmax_agreement": sum(agreed) / len(agreed),
        "argmax_agreement_without_ties": sum(clear) / len(clear) if clear else math.nan,
        "near_ties": 1 - len(clear) / len(agreed),
        "max_logprob_difference": max(
            abs(ours - theirs) for ours, theirs in zip(scores.logprobs, reference.logprobs, strict=True)
        ),
    }
