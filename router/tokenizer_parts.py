"""What the readers of tokenizer files hand to ``Tokenizer``."""

from typing import NamedTuple

import tokenizers


class TokenizerParts(NamedTuple):
    """``special_tokens`` maps names as ``bos_token`` to texts, for chat templates."""

    backend: tokenizers.Tokenizer
    special_tokens: dict[str, str]
    chat_template: str | None
