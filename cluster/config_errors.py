"""Says what is wrong with a configuration in one line, with a guess at what was meant."""

from collections.abc import Iterable
from difflib import get_close_matches

from pydantic import ValidationError


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """``; did you mean x?`` or nothing."""
    matches = get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f"; did you mean {matches[0]}?" if matches else ""


def unknown_key(where: str, key: str, known: Iterable[str]) -> str:
    """The message for a key that nobody knows."""
    return f"{where}: unknown key{did_you_mean(key, known)}"


def explain_invalid(error: ValidationError, *, secret: frozenset[str]) -> tuple[str, str]:
    """(key, message) of pydantic's first complaint. Values of ``secret`` keys are not shown."""
    first = error.errors()[0]
    key = str(first["loc"][0])
    value = first["input"]
    if first["type"] == "literal_error":
        choices = str(first.get("ctx", {}).get("expected", "")).replace("'", "")
        words = choices.replace(" or ", ", ").split(", ")
        return key, f"{value!r} is not one of {', '.join(words)}{did_you_mean(str(value), words)}"
    if first["type"] == "value_error":
        return key, first["msg"].removeprefix("Value error, ")
    # The index of an item in a list of names; unions add words that say nothing to a user.
    path = "".join(f"[{part}]" for part in first["loc"][1:] if isinstance(part, int))
    message = first["msg"].replace("Input should", "should", 1)
    shown = "" if key in secret else f", not {value!r}"
    return key, f"{path} {message}{shown}".strip()
