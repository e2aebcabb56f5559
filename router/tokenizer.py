"""Text to token ids and back, on the ``tokenizers`` library alone."""

from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers

from ..cluster.errors import ConfigError, ModelLoadError
from .detokenizer import ByteDetokenizer, Detokenizer, WindowDetokenizer
from .gguf_tokenizer import load_gguf_tokenizer
from .hf_tokenizer import load_hf_tokenizer
from .token_bytes import ByteTable, token_to_bytes
from .tokenizer_parts import TokenizerParts


class Tokenizer:
    """A model's vocabulary, its special tokens and its chat template."""

    def __init__(self, parts: TokenizerParts) -> None:
        self._backend = parts.backend
        self.special_tokens = parts.special_tokens
        """Texts by name (``bos_token``, ``eos_token``, …), as chat templates read them."""
        self.chat_template = parts.chat_template
        added = parts.backend.get_added_tokens_decoder()
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self.vocab_size = max(parts.backend.get_vocab_size(), max(added, default=-1) + 1)
        """Ids are below this; a model may have more rows for padding."""
        self._spells = token_to_bytes(parts.backend)
        to_bytes = self._spells or str.encode
        self._bytes = ByteTable(parts.backend.id_to_token, to_bytes, frozenset())
        self._shown_bytes = ByteTable(parts.backend.id_to_token, to_bytes, self.special_ids)

    @classmethod
    def from_path(cls, path: Path, chat_template: str | None = None) -> "Tokenizer":
        """From a Hugging Face folder or a GGUF file; ``chat_template`` (text, or the path of one) replaces its own.

        Raises ModelLoadError when there is no tokenizer to be read, ConfigError for a template that is neither.
        """
        if path.is_dir():
            parts = load_hf_tokenizer(path)
        elif path.is_file() and path.suffix == ".json":
            parts = load_hf_tokenizer(path.parent)
        elif path.is_file():
            parts = load_gguf_tokenizer(path)
        else:
            raise ModelLoadError(f"no tokenizer at {path}")
        if chat_template is not None:
            parts = parts._replace(chat_template=_template_text(chat_template))
        return cls(parts)

    @classmethod
    def from_dict(cls, card: dict[str, Any]) -> "Tokenizer":
        """Inverse of ``to_dict``."""
        backend = tokenizers.Tokenizer.from_str(card["tokenizer"])
        return cls(TokenizerParts(backend, dict(card["special_tokens"]), card["chat_template"]))

    def to_dict(self) -> dict[str, Any]:
        """All of it as strings, so that other machines need no files."""
        return {
            "tokenizer": self._backend.to_str(),
            "special_tokens": self.special_tokens,
            "chat_template": self.chat_template,
        }

    @cached_property
    def longest_token(self) -> int | None:
        """Bytes of the token that has most; None where a token may stand for more than it spells."""
        if self._spells is None:
            return None
        return max(len(self.token_bytes(token_id)) for token_id in range(self.vocab_size))

    @property
    def bos_token_id(self) -> int | None:
        """Of the token that begins a text."""
        return self._special_id("bos_token")

    @property
    def eos_token_id(self) -> int | None:
        """Of the token that ends a text; a model's configuration may name more."""
        return self._special_id("eos_token")

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids. Special tokens written in ``text`` are recognised; BOS and the like are added if asked for."""
        # Unlike encode, this lets other threads run, and leaves out the offsets.
        return self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        """The whole text; bytes that are no character become U+FFFD."""
        return self._backend.decode(ids, skip_special_tokens=skip_special_tokens)

    def detokenizer(self, skip_special_tokens: bool = True) -> Detokenizer:
        """For one output, token by token."""
        if self._spells is not None:
            return ByteDetokenizer(self._shown_bytes if skip_special_tokens else self._bytes)
        return WindowDetokenizer(lambda ids: self.decode(ids, skip_special_tokens))

    def token_bytes(self, token_id: int) -> bytes:
        """What the token adds to a text, maybe a part of a character; empty for ids outside the vocabulary."""
        return self._bytes[token_id]

    def token_text(self, token_id: int) -> str:
        """The token as text; bytes that are no whole character become U+FFFD."""
        return self._bytes[token_id].decode("utf-8", "replace")

    def is_special(self, text: str) -> bool:
        """Whether the text is a token that is left out of outputs."""
        return self._backend.token_to_id(text) in self.special_ids

    def _special_id(self, name: str) -> int | None:
        text = self.special_tokens.get(name)
        return None if text is None else self._backend.token_to_id(text)


def _template_text(template: str) -> str:
    if "{" in template or "\n" in template:
        return template
    path = Path(template)
    if not path.is_file():
        raise ConfigError(f"no chat template at {template}", param="--chat-template")
    return path.read_text(encoding="utf-8")
