"""Tool calls in a model's text, found while it streams: the name whole and once, then the arguments as they come.

What looks like a call and turns out to be none is text.
"""

import json
import re
from dataclasses import dataclass

from .tool_formats import ToolFormat

_HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)')


@dataclass(frozen=True, slots=True)
class CallPiece:
    """A part of the answer's call number ``index``. The first one has the name."""

    index: int
    name: str | None
    arguments: str


Piece = str | CallPiece
"""Text, or a part of a call."""


class ToolCallParser:
    """Of one answer. ``most_calls`` bounds the calls; later ones are dropped."""

    def __init__(self, form: ToolFormat, most_calls: int | None = None) -> None:
        self._form = form
        self._most_calls = most_calls
        self._text = ""
        """Not handed out yet."""
        self._object: _Object | None = None
        """The call that is being read."""
        self._inside = not form.opens
        """Whether a call may begin at the next letter that is no space."""
        self._said = False
        """Whether there has been text since the last call."""
        self.num_calls = 0
        """That have begun."""

    def push(self, text: str) -> list[Piece]:
        """The next pieces."""
        self._text += text
        pieces: list[Piece] = []
        while self._step(pieces, ends=False):
            pass
        return self._kept(pieces)

    def flush(self) -> list[Piece]:
        """What is left when the answer has ended."""
        pieces: list[Piece] = []
        while self._step(pieces, ends=True):
            pass
        if self._object is not None and not self._object.has_name:
            self._say(self._form.opens + self._object.text, pieces)
            self._object = None
        return self._kept(pieces)

    def _kept(self, pieces: list[Piece]) -> list[Piece]:
        most = self._most_calls
        if most is None:
            return pieces
        return [piece for piece in pieces if isinstance(piece, str) or piece.index < most]

    def _step(self, pieces: list[Piece], *, ends: bool) -> bool:
        """Read on; whether there is more to read now."""
        if self._object is not None:
            return self._read(self._object, pieces)
        return self._begin(pieces, ends=ends) if self._inside else self._look(pieces, ends=ends)

    def _look(self, pieces: list[Piece], *, ends: bool) -> bool:
        """For the mark that opens calls; text before it is said, but for spaces and what may be its beginning."""
        opens = self._form.opens
        before, mark, after = self._text.partition(opens) if opens else (self._text, "", "")
        if mark:
            self._say(before.rstrip(), pieces)
            self._text, self._inside = after, True
            return True
        held = 0 if ends or not opens else _held(before, opens)
        self._say(before[: len(before) - held], pieces)
        self._text = before[len(before) - held :]
        return False

    def _begin(self, pieces: list[Piece], *, ends: bool) -> bool:
        """A call, or what comes between calls."""
        stripped = self._text.lstrip(" \n\r\t,;[]")
        if stripped.startswith("{"):
            self._text, self._object = stripped, _Object(needs_arguments=not self._form.opens)
            return True
        closes = self._form.closes
        if closes and stripped.startswith(closes):
            self._text, self._inside = stripped[len(closes) :], False
            return True
        if not ends and (not stripped or (closes and closes.startswith(stripped))):
            return False
        if stripped:  # no call
            self._say(self._form.opens + self._text if not self.num_calls else self._text, pieces)
        self._text, self._inside = "", False
        return False

    def _read(self, call: "_Object", pieces: list[Piece]) -> bool:
        """More of the call's object."""
        name, arguments, used = call.push(self._text)
        self._text = self._text[used:]
        if name is not None:
            self.num_calls += 1
            self._said = False
        if name is not None or arguments:
            pieces.append(CallPiece(self.num_calls - 1, name, arguments))
        if not call.done:
            return False
        if not call.has_name:
            self._say(self._form.opens + call.text, pieces)
            self._inside = False
        self._object = None
        return bool(self._text)

    def _say(self, text: str, pieces: list[Piece]) -> None:
        if self.num_calls and not self._said:
            text = text.lstrip()
        if text:
            pieces.append(text)
            self._said = True


class _Object:
    """One JSON object, letter by letter."""

    def __init__(self, *, needs_arguments: bool) -> None:
        """``needs_arguments``: with a name alone it is no call."""
        self._needs_arguments = needs_arguments
        self.text = ""
        self.done = False
        self.has_name = False
        self._said: int | None = None
        """Up to where the arguments have been handed out, once it is known where they begin."""
        self._depth = 0
        self._in_string = False
        self._escaped = False

    def push(self, text: str) -> tuple[str | None, str, int]:
        """(name if it is known now, arguments that are new, letters of ``text`` that belong to the object)."""
        used = self._scan(text)
        self.text += text[:used]
        name = None
        if self._said is None:
            head = _HEAD.match(self.text)
            if head is None:
                return (*self._whole(), used) if self.done else (None, "", used)
            self.has_name, self._said = True, head.end()
            name = json.loads(head[1], strict=False)
        return name, self._more(self._said), used

    def _scan(self, text: str) -> int:
        """Letters up to the end of the object, or all."""
        for index, letter in enumerate(text):
            if self._escaped:
                self._escaped = False
            elif self._in_string:
                self._escaped, self._in_string = letter == "\\", letter != '"'
            elif letter == '"':
                self._in_string = True
            elif letter in "{[":
                self._depth += 1
            elif letter in "}]":
                self._depth -= 1
                if not self._depth:
                    self.done = True
                    return index + 1
        return len(text)

    def _more(self, start: int) -> str:
        """Arguments that have not been handed out: without the bracket that closes the object, and spaces before it."""
        end = len(self.text) - self.done if self._depth < 2 else len(self.text)
        found = self.text[start:end]
        if self._depth < 2:
            found = found.rstrip()
        self._said = start + len(found)
        return found

    def _whole(self) -> tuple[str | None, str]:
        """(name, arguments) of an object in another order; no name: it is no call."""
        try:
            call = json.loads(self.text, strict=False)
        except (ValueError, RecursionError):
            return None, ""
        given = [call[key] for key in ("arguments", "parameters") if key in call]
        if not isinstance(call.get("name"), str) or (self._needs_arguments and not given):
            return None, ""
        self.has_name = True
        arguments = (given[0] if given else None) or {}
        return call["name"], arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def _held(text: str, mark: str) -> int:
    """Letters at the end of ``text`` that may be the beginning of the mark, and spaces before them."""
    size = next((n for n in range(min(len(text), len(mark) - 1), 0, -1) if text.endswith(mark[:n])), 0)
    spoken = text[: len(text) - size].rstrip()
    return len(text) - len(spoken)
