"""Builds a tokenizer from a GGUF file's metadata, which holds vocabulary, merges or scores, and flags.

``tokenizer.ggml.model`` is ``gpt2`` (byte-level BPE; ``pre`` names how text is split before it) or ``llama``
(SentencePiece). Splits are those of the models' own ``tokenizer.json``, which llama.cpp's ``pre`` names stand for.
"""

from collections.abc import Iterable
from enum import IntEnum
from itertools import repeat
from pathlib import Path
from typing import Any, cast

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE

from ..cluster.damaged import reading
from ..cluster.errors import ModelLoadError
from .byte_alphabet import BYTE_TO_CHAR, CHAR_TO_BYTE
from .gguf_metadata import read_gguf_metadata
from .tokenizer_parts import TokenizerParts, text_or_none

_SPACE = "\u2581"
_GEMMA = ("gemma", "gemma2", "gemma3")

_WORD = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_CASED = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_DEEPSEEK3 = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3 = (rf"{_WORD}|\p{{N}}{{1,3}}|{_REST}",)
_QWEN2 = (rf"{_WORD}|\p{{N}}|{_REST}",)
_DIGITS = (r"\p{N}",)

_SPLITS: dict[str, tuple[tuple[str, ...], bool]] = {
    # pre: (regexes applied one after the other, whether GPT-2's own regex follows)
    **dict.fromkeys(("default", "gpt-2", "gpt2", "mpt", "olmo", "jais"), ((), True)),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone"), (_DIGITS, True)),
    **dict.fromkeys(("llama3", "llama-v3", "llama-bpe", "falcon3", "smaug-bpe", "dbrx"), (_LLAMA3, False)),
    **dict.fromkeys(("qwen2", "stablelm2", "deepseek-r1-qwen", "megrez"), (_QWEN2, False)),
    "tekken": ((_CASED,), False),
    "deepseek-v3": ((r"\p{N}{1,3}", r"[一-龥぀-ゟ゠-ヿ]+", _DEEPSEEK3), False),
    "deepseek-coder": ((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", r"[一-龥ࠀ-一가-퟿]+", r"\p{N}"), False),
}
_WHOLE_WORDS = ("llama3", "llama-v3", "llama-bpe", "falcon3", "tekken")
"""Splits whose vocabularies take a word that is a token as it is, whatever the merges say."""


class _TokenType(IntEnum):
    NORMAL = 1
    CONTROL = 3
    USER_DEFINED = 4


def load_gguf_tokenizer(path: Path) -> TokenizerParts:
    """The tokenizer in a GGUF file. Raises ModelLoadError when it has none or one of an unknown kind."""
    wanted = ("tokenizer.", "general.architecture")
    metadata = read_gguf_metadata(path, lambda key: key.startswith(wanted))
    facts = {key.removeprefix("tokenizer.ggml."): value for key, value in metadata.items()}
    model, tokens = facts.get("model"), facts.get("tokens")
    if not isinstance(tokens, list) or model not in ("gpt2", "llama"):
        known = "byte-level BPE ('gpt2') and SentencePiece ('llama')"
        raise ModelLoadError(f"{path}: tokenizer {model!r} is not supported; {known} are. Give --tokenizer a folder")
    with reading(f"{path}: tokenizer"):
        backend = _byte_level(path, facts) if model == "gpt2" else _sentencepiece(facts)
        _add_tokens(backend, facts)
        special = _special_tokens(facts)
        _add_bos_and_eos(backend, facts, special, bos_by_default=model == "llama")
        return TokenizerParts(backend, special, text_or_none(facts.get("tokenizer.chat_template")))


def _byte_level(path: Path, facts: dict[str, Any]) -> Tokenizer:
    name = facts.get("pre", "default")
    if name not in _SPLITS:
        raise ModelLoadError(f"{path}: text split {name!r} is not known; give --tokenizer a folder with tokenizer.json")
    merges = [_pair(merge) for merge in facts.get("merges", ())]
    vocab = {_spelled(token, kind): index for index, (token, kind) in enumerate(_typed_tokens(facts))}
    backend = Tokenizer(BPE(vocab=vocab, merges=merges, ignore_merges=name in _WHOLE_WORDS))
    regexes, gpt2_follows = _SPLITS[name]
    steps: list[Any] = [pre_tokenizers.Split(Regex(regex), "isolated") for regex in regexes]
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=gpt2_follows))
    backend.pre_tokenizer = cast(Any, pre_tokenizers.Sequence(steps))
    backend.decoder = cast(Any, decoders.ByteLevel())
    return backend


def _spelled(token: str, kind: int) -> str:
    """Tokens are written in the byte alphabet; some files have normal tokens as plain text."""
    if kind in (_TokenType.CONTROL, _TokenType.USER_DEFINED) or CHAR_TO_BYTE.keys() >= set(token):
        return token
    return "".join(BYTE_TO_CHAR[byte] for byte in token.encode())


def _pair(merge: str) -> tuple[str, str]:
    left, _, right = merge.partition(" ")
    return left, right


def _sentencepiece(facts: dict[str, Any]) -> Tokenizer:
    gemma = facts.get("general.architecture") in _GEMMA
    tokens: list[str] = facts["tokens"]
    if gemma:
        # Gemma's files write runs of spaces as they are, and their scores do not follow the order of merges.
        tokens = [_SPACE * len(token) if token and not token.strip(" ") else token for token in tokens]
    scores = [-float(index) for index in range(len(tokens))] if gemma else facts["scores"]
    vocab = {token: index for index, token in enumerate(tokens)}
    merges = [_pair(merge) for merge in facts["merges"]] if "merges" in facts else _merges(vocab, tokens, scores)
    unknown = facts.get("unknown_token_id")
    unk_token = tokens[unknown] if unknown is not None else None
    backend = Tokenizer(BPE(vocab=vocab, merges=merges, fuse_unk=True, byte_fallback=True, unk_token=unk_token))
    prefix = bool(facts.get("add_space_prefix", not gemma))
    if gemma:
        backend.normalizer = cast(Any, normalizers.Replace(" ", _SPACE))
        backend.pre_tokenizer = cast(Any, pre_tokenizers.Split(" ", "merged_with_previous"))
    else:
        scheme = "first" if prefix else "never"
        backend.pre_tokenizer = cast(Any, pre_tokenizers.Metaspace(_SPACE, prepend_scheme=scheme, split=False))
    strip = [decoders.Strip(" ", 1, 0)] if prefix else []
    steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    backend.decoder = cast(Any, decoders.Sequence(steps))
    return backend


def _merges(vocab: dict[str, int], tokens: list[str], scores: Iterable[float]) -> list[tuple[str, str]]:
    """SentencePiece's BPE as a list of merges: any two pieces join whose union is a piece, best score first.

    Ties go as in transformers' ``generate_merges``, so that ids agree.
    """
    found: list[tuple[float, int, int, str, str]] = []
    for token, score in zip(tokens, scores, strict=True):
        halves = ((token[:cut], token[cut:]) for cut in range(1, len(token)))
        known = [(left, right) for left, right in halves if left in vocab and right in vocab]
        if len(known) > 1:
            known.sort(key=lambda pair: (vocab[pair[0]], vocab[pair[1]]))
        found += [(score, len(left), len(right), left, right) for left, right in known]
    found.sort(key=lambda merge: merge[:3], reverse=True)
    return [(left, right) for *_, left, right in found]


def _typed_tokens(facts: dict[str, Any]) -> Iterable[tuple[str, int]]:
    return zip(facts["tokens"], facts.get("token_type") or repeat(_TokenType.NORMAL), strict=False)


def _add_tokens(backend: Tokenizer, facts: dict[str, Any]) -> None:
    """Control and user-defined tokens are matched whole; only control tokens are skipped in the output.

    Gemma's runs of spaces are user-defined, and left to the merges since the vocabulary spells them otherwise.
    """
    for kind, special in ((_TokenType.CONTROL, True), (_TokenType.USER_DEFINED, False)):
        matching = [token for token, its_kind in _typed_tokens(facts) if its_kind == kind]
        known = [token for token in matching if backend.token_to_id(token) is not None]
        added = [AddedToken(token, normalized=False, special=special) for token in known if token]
        if special:
            backend.add_special_tokens(added)
        else:
            backend.add_tokens(added)


def _special_tokens(facts: dict[str, Any]) -> dict[str, str]:
    names = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    ids = {name: facts.get(f"{key}_token_id") for name, key in names.items()}
    return {name: facts["tokens"][index] for name, index in ids.items() if index is not None}


def _add_bos_and_eos(
    backend: Tokenizer, facts: dict[str, Any], special: dict[str, str], *, bos_by_default: bool
) -> None:
    """As llama.cpp: SentencePiece vocabularies begin with BOS unless the file says otherwise."""
    bos = special.get("bos_token") if facts.get("add_bos_token", bos_by_default) else None
    eos = special.get("eos_token") if facts.get("add_eos_token", False) else None
    backend.post_processor = cast(Any, bos_eos_processor(backend, bos, eos))


def bos_eos_processor(backend: Tokenizer, bos: str | None, eos: str | None) -> processors.TemplateProcessing:
    """Puts ``bos`` before and ``eos`` after a text that is encoded with special tokens."""
    names = [name for name in (bos, eos) if name is not None]
    template = [name for name in (bos, "$A", eos) if name is not None]
    return processors.TemplateProcessing(
        single=template, pair=[*template, "$B:1"], special_tokens=[(name, backend.token_to_id(name)) for name in names]
    )
