"""An answer in one form, whether it came whole or as a stream, by chat or as a completion; and how two are compared."""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

LOGPROB_TOLERANCE = 2e-4
"""Largest difference of a log-probability that rounding in float32 may make, by another order of sums or a gang."""
Logprobs = list[tuple[str, float, dict[str, float]]]
"""For each token its text, its log-probability, and those of the likeliest."""


@dataclass(slots=True)
class Choice:
    """One choice of an answer, or what has come of it."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: Logprobs = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    def add(self, piece: Mapping[str, Any]) -> None:
        """A choice of a body or a chunk, of either API."""
        message = piece.get("delta") or piece.get("message") or {}
        self.text += piece.get("text") or message.get("content") or ""
        self.token_ids += piece.get("token_ids") or []
        self.logprobs += _logprobs(piece.get("logprobs") or {})
        self.finish_reason = piece.get("finish_reason") or self.finish_reason
        if piece.get("stop_reason") is not None:
            self.stop_reason = piece["stop_reason"]


Answer = dict[int, Choice]
"""Choices by index."""


def add(answer: Answer, body: Mapping[str, Any]) -> None:
    """Take in a whole body, or a chunk of a stream."""
    for piece in body["choices"]:
        answer.setdefault(piece["index"], Choice()).add(piece)


def to_json(answer: Answer) -> list[dict[str, Any]]:
    """For a file; ``from_json`` reads it."""
    return [{"index": index, **asdict(choice)} for index, choice in sorted(answer.items())]


def from_json(choices: Iterable[Mapping[str, Any]]) -> Answer:
    """What ``to_json`` wrote."""
    answer: Answer = {}
    for choice in choices:
        fields = {name: value for name, value in choice.items() if name != "index"}
        logprobs = [(token, value, top) for token, value, top in fields.pop("logprobs")]
        answer[choice["index"]] = Choice(**fields, logprobs=logprobs)
    return answer


@dataclass(frozen=True, slots=True)
class Fork:
    """Where two answers part: after the same tokens, one goes on with another."""

    choice: int
    place: int
    right: int
    got: int
    """Token ids."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """How an answer compares."""

    why: str = ""
    """What is wrong; empty: nothing."""
    logprob_error: float = 0.0
    """Largest difference of a log-probability."""
    fork: Fork | None = None
    """If what is wrong is a token."""


def compare(right: Answer, got: Answer, *, complete: bool) -> Verdict:
    """Hold an answer against the right one; an incomplete one must be how the right one begins."""
    error = 0.0
    if complete and got.keys() != right.keys():
        return Verdict(f"choices {sorted(got)} instead of {sorted(right)}")
    for index, choice in got.items():
        verdict = _compare(index, right[index], choice, complete)
        error = max(error, verdict.logprob_error)
        if verdict.why:
            return Verdict(f"choice {index}: {verdict.why}", error, verdict.fork)
    return Verdict(logprob_error=error)


def _compare(index: int, right: Choice, got: Choice, complete: bool) -> Verdict:
    end = len(right.token_ids) if complete else len(got.token_ids)
    if got.token_ids != right.token_ids[:end]:
        return _at_fork(index, right.token_ids, got.token_ids)
    if got.text != (right.text if complete else right.text[: len(got.text)]):
        return Verdict(f"text {got.text!r} instead of {right.text!r}")
    if complete and (got.finish_reason, got.stop_reason) != (right.finish_reason, right.stop_reason):
        return Verdict(f"ended by {got.finish_reason} {got.stop_reason!r}, not {right.finish_reason}")
    return _compare_logprobs(right.logprobs, got.logprobs, complete)


def _at_fork(index: int, right: list[int], got: list[int]) -> Verdict:
    pairs = enumerate(zip(right, got, strict=False))
    fork = next((Fork(index, place, *pair) for place, pair in pairs if pair[0] != pair[1]), None)
    if fork is None:
        return Verdict(f"{len(got)} tokens instead of {len(right)}")
    return Verdict(f"token {fork.place} is {fork.got} instead of {fork.right}", fork=fork)


def _compare_logprobs(right: Logprobs, got: Logprobs, complete: bool) -> Verdict:
    if len(got) > len(right) or (complete and len(got) != len(right)):
        return Verdict(f"{len(got)} log-probabilities instead of {len(right)}")
    error = 0.0
    for place, ((token, value, top), (their_token, theirs, their_top)) in enumerate(zip(right, got, strict=False)):
        error = max(error, abs(value - theirs), *(abs(top[t] - their_top[t]) for t in top.keys() & their_top.keys()))
        if token != their_token or error > LOGPROB_TOLERANCE:
            return Verdict(f"log-probability {place} is {theirs} of {their_token!r}, not {value}", error)
    return Verdict(logprob_error=error)


def _logprobs(piece: Mapping[str, Any]) -> Logprobs:
    if "content" in piece:
        content = piece["content"] or []
        return [(e["token"], e["logprob"], {t["token"]: t["logprob"] for t in e["top_logprobs"]}) for e in content]
    columns = (piece.get(name) or [] for name in ("tokens", "token_logprobs", "top_logprobs"))
    return [(token, value, top or {}) for token, value, top in zip(*columns, strict=True)]
