"""Token ids to text, piece by piece, without ever emitting half a character.

The pieces of an output together are its whole text. Where bytes are no character, U+FFFD stands for them: as
soon as they cannot become one, or at the end.
"""

import codecs
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

_REPLACEMENT = "\ufffd"
_LONGEST_WINDOW = 32
"""Tokens: skipped special tokens add no text, and must not make the window grow for ever."""
_LONGEST_CHARACTER = 4
"""A character is at most four bytes, so four tokens: what is not one by then never will be."""


class Detokenizer(Protocol):
    """The text of one output, growing."""

    def push(self, token_ids: Sequence[int]) -> str:
        """The text that these tokens complete."""
        ...

    def flush(self) -> str:
        """What was held back: the remains of a character that the output ends in."""
        ...


class ByteDetokenizer:
    """For tokenizers whose tokens are bytes: one table look-up per token."""

    def __init__(self, token_bytes: Mapping[int, bytes]) -> None:
        self._bytes_of = token_bytes.__getitem__
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode

    def push(self, token_ids: Sequence[int]) -> str:
        """See Detokenizer."""
        return self._decode(b"".join(map(self._bytes_of, token_ids)))

    def flush(self) -> str:
        """See Detokenizer."""
        return self._decode(b"", True)


class WindowDetokenizer:
    """For any tokenizer: decodes a short window twice, with and without the new tokens, and takes the difference.

    The window begins at the tokens that were emitted last, since how a token is written may depend on its neighbour.
    """

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        self._decode = decode
        self._window: list[int] = []
        self._num_emitted = 0
        self._emitted = ""

    def push(self, token_ids: Sequence[int]) -> str:
        """See Detokenizer."""
        self._window += token_ids
        text = self._decode(self._window)
        held = len(self._window) - self._num_emitted
        if text.endswith(_REPLACEMENT) and held < _LONGEST_CHARACTER:
            return ""
        return self._emit(text)

    def flush(self) -> str:
        """See Detokenizer."""
        return self._emit(self._decode(self._window))

    def _emit(self, text: str) -> str:
        new = text[len(self._emitted) :]
        if new or len(self._window) > _LONGEST_WINDOW:
            del self._window[: self._num_emitted]
            self._num_emitted = len(self._window)
            self._emitted = self._decode(self._window)
        return new
