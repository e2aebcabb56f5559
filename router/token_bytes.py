"""The bytes that each token adds to a text, for decoders where text is the concatenation of its tokens' bytes."""

import json
import re
from collections.abc import Callable
from typing import Any

import tokenizers

from .byte_alphabet import CHAR_TO_BYTE

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SENTENCEPIECE = {"Replace", "ByteFallback", "Fuse", "Strip"}

TokenToBytes = Callable[[str], bytes]


class ByteTable(dict[int, bytes]):
    """Token id to bytes, filled as ids come up. ``skipped`` ids and unknown ones are empty."""

    def __init__(self, text_of: Callable[[int], str | None], to_bytes: TokenToBytes, skipped: frozenset[int]) -> None:
        super().__init__()
        self._text_of = text_of
        self._to_bytes = to_bytes
        self._skipped = skipped

    def __missing__(self, token_id: int) -> bytes:
        text = self._text_of(token_id)
        value = b"" if text is None or token_id in self._skipped else self._to_bytes(text)
        self[token_id] = value
        return value


def token_to_bytes(backend: tokenizers.Tokenizer) -> TokenToBytes | None:
    """How tokens of this tokenizer spell bytes, or None when its decoder is of another kind.

    Byte-level BPE and SentencePiece with byte fallback (Llama, Qwen, Mistral, Gemma) are known. SentencePiece's
    decoder strips the first space of a whole text; that is left out, since an output continues a prompt.
    """
    steps = _decoder_steps(backend)
    kinds = {step["type"] for step in steps}
    if kinds == {"ByteLevel"}:
        return _byte_level
    if "ByteFallback" in kinds and kinds <= _SENTENCEPIECE:
        replacements = [(step["pattern"].get("String"), step["content"]) for step in steps if step["type"] == "Replace"]
        if all(pattern is not None for pattern, _ in replacements):
            return lambda token: _byte_fallback(token, replacements)
    return None


def _decoder_steps(backend: tokenizers.Tokenizer) -> list[dict[str, Any]]:
    decoder: Any = backend.decoder
    if decoder is None:
        return []
    state = json.loads(decoder.__getstate__())
    return state["decoders"] if state["type"] == "Sequence" else [state]


def _byte_level(token: str) -> bytes:
    try:
        return bytes(CHAR_TO_BYTE[char] for char in token)
    except KeyError:
        return token.encode()


def _byte_fallback(token: str, replacements: list[tuple[str, str]]) -> bytes:
    for pattern, content in replacements:
        token = token.replace(pattern, content)
    byte = _BYTE_TOKEN.fullmatch(token)
    return bytes([int(byte[1], 16)]) if byte else token.encode()
