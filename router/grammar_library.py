"""llguidance, which turns grammars into masks over a vocabulary: an optional extra, imported when it is first needed.

The ingress only asks it whether a grammar is one; the replica compiles grammars for its tokenizer.
"""

import json
from collections.abc import Sequence
from types import ModuleType
from typing import Any

from ..cluster.errors import InvalidRequestError
from ..cluster.output_grammar import OutputGrammar
from .tokenizer import Tokenizer

JSON_OPTIONS = {"whitespace_pattern": "[\\x20\\x0A\\x0D\\x09]{1,20}"}
"""Bounded, for small models like to write nothing but spaces."""
LIMITS = {
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 200_000,
    "step_max_items": 50_000,
    "max_lexer_states": 20_000,
    "max_grammar_size": 100_000,
    "verbose_errors": False,
}
"""Of one output: some tens of milliseconds to compile its grammar, and some to find what may come next; at most some
tens of megabytes of states."""


def library() -> ModuleType:
    """The library. Raises InvalidRequestError where it is not installed."""
    try:
        import llguidance
    except ImportError:
        raise InvalidRequestError(
            "this server has no structured output: install the extra, pip install 'warmroot[structured]'"
        ) from None
    return llguidance


def source_of(grammar: OutputGrammar) -> str:
    """The grammar as the library reads it. Raises ValueError for text that is not of its kind."""
    match grammar.kind:
        case "json_schema":
            return library().LLMatcher.grammar_from_json_schema(grammar.text, overrides=JSON_OPTIONS)
        case "regex":  # digits are those of ASCII, as in JSON schemas and in most other servers
            expression = library().regex_to_lark(grammar.text, use_ascii="d")
            return f"start: /{expression}/"
        case "choice":
            return "start: " + " | ".join(map(json.dumps, json.loads(grammar.text)))
        case _:
            return library().grammar_from(grammar.kind, grammar.text)


def limits() -> Any:
    """``LIMITS`` as the library takes them."""
    return library().LLParserLimits(**LIMITS)


def fault_of(grammar: OutputGrammar) -> str:
    """Why the library does not take a grammar; empty if it does. Takes milliseconds; other threads run meanwhile."""
    try:
        message: str = library().LLMatcher.validate_grammar(source_of(grammar), None, limits=limits())
    except ValueError as error:
        message = str(error)
    return "" if message.startswith("WARNING:") else " ".join(message.split())[:500]


def vocabulary(tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Sequence[int]) -> Any:
    """The library's tokenizer over ours, for a model with so many rows of logits. Takes a tenth of a second or more."""
    own = _Vocabulary(tokenizer, vocab_size, eos_token_ids)
    return library().LLTokenizer(own, n_vocab=vocab_size, eos_token=[*eos_token_ids])


class _Vocabulary:
    """What the library asks of a tokenizer."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self.eos_token_id = eos_token_ids[0]
        self.tokens = [tokenizer.token_bytes(token_id) for token_id in range(min(vocab_size, tokenizer.vocab_size))]
        self.special_token_ids = sorted(token_id for token_id in tokenizer.special_ids if token_id < vocab_size)
        self._tokenizer = tokenizer

    def __call__(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)
