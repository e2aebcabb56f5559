"""Whether a token that differs was as likely as the right one, so that rounding alone decided: shown, not supposed.

The undisturbed engine is asked again with a nudge that is far smaller than anything a wrong token would need. Where it
then takes the other token at the same place, after the same tokens, the two were tied.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from .answers import Answer, Fork
from .asks import Ask
from .reference import Question, undisturbed
from .verdict import Wrong

NUDGE = 5e-4
"""Of logits, and of shares of the temperature and of ``top_p``. Ranks round log-probabilities by up to 5e-5."""


def split_ties(wrong: Sequence[Wrong], model: str) -> tuple[list[Wrong], list[Wrong]]:
    """Those that are ties, and those that are wrong."""
    forked = [(one, fork) for one in wrong if (fork := one.verdict.fork)]
    questions = [(one, fork, question) for one, fork in forked for question in nudged(one.outcome.ask, fork)]
    answers = undisturbed([question for _, _, question in questions], model) if questions else []
    ties = {
        id(one) for (one, fork, _), answer in zip(questions, answers, strict=True) if takes(answer, fork, one.answer)
    }
    return [one for one in wrong if id(one) in ties], [one for one in wrong if id(one) not in ties]


def takes(answer: Answer, fork: Fork, got: Answer) -> bool:
    """Whether a nudged answer goes the way that was gone, up to and with the token that differs."""
    tokens = answer[fork.choice].token_ids[: fork.place + 1]
    return fork.choice in got and tokens == got[fork.choice].token_ids[: fork.place + 1]


def nudged(ask: Ask, fork: Fork) -> list[Question]:
    """The request with one thing or another a little different."""
    body: dict[str, Any] = ask.body
    changes: list[Mapping[str, Any]] = [{"logit_bias": {str(fork.got): NUDGE, str(fork.right): -NUDGE}}]
    for sign in (-1, 1):
        changes += [{"logit_bias": {str(token): sign * NUDGE}} for token in (fork.got, fork.right)]
        for name in ("temperature", "top_p"):
            if body.get(name):
                changes += [{name: body[name] * (1 + sign * share)} for share in (NUDGE / 4, NUDGE)]
    return [(ask.path, {**body, **change}) for change in changes]
