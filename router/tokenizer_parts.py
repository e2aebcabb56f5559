"""What the readers of tokenizer files hand to ``Tokenizer``."""

from typing import NamedTuple

import tokenizers


class TokenizerParts(NamedTuple):
    """``special_tokens`` maps names as ``bos_token`` to texts, for chat templates."""

    backend: tokenizers.Tokenizer
    special_tokens: dict[str, str]
    chat_template: str | None


def text_or_none(template: object) -> str | None:
    """A chat template as a file has it. Raises TypeError when it is no text."""
    if template is not None and not isinstance(template, str):
        raise TypeError(f"the chat template is {type(template).__name__}, no text")
    return template
