"""Says what is wrong with a configuration in one line, with a guess at what was meant."""

from collections.abc import Iterable
from difflib import get_close_matches
from reprlib import Repr
from typing import Any

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
        hint = did_you_mean(shown(value).strip("'"), words)
        return key, f"{shown(value)} is not one of {', '.join(words)}{hint}"
    if first["type"] == "value_error":
        return key, first["msg"].removeprefix("Value error, ")
    # The index of an item in a list of names; unions add words that say nothing to a user.
    path = "".join(f"[{part}]" for part in first["loc"][1:] if isinstance(part, int))
    message = first["msg"].replace("Input should", "should", 1)
    found = "" if key in secret else f", not {shown(value)}"
    return key, f"{path} {message}{found}".strip()


def shown(value: Any) -> str:
    """``value`` in a message: a few lines of YAML with references to themselves can be longer than memory."""
    short = Repr()
    short.maxstring = short.maxother = short.maxlong = 200
    return short.repr(value)
