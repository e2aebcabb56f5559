"""Reads the tokenizer of a Hugging Face folder: tokenizer.json, and what its neighbours add to it."""

import json
from pathlib import Path
from typing import Any, cast

import tokenizers
from tokenizers import AddedToken

from ..cluster.damaged import reading
from ..cluster.errors import ModelLoadError
from .gguf_tokenizer import bos_eos_processor
from .tokenizer_parts import TokenizerParts, text_or_none

_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


def load_hf_tokenizer(folder: Path) -> TokenizerParts:
    """The tokenizer in ``folder``. Raises ModelLoadError when there is none that can be read."""
    backend = _backend(folder)
    with reading(f"{folder}: tokenizer_config.json and its neighbours"):
        config = _read(folder / "tokenizer_config.json")
        special = _special_tokens({**_read(folder / "special_tokens_map.json"), **config})
        _add_tokens(backend, config, special)
        if "add_bos_token" in config or "add_eos_token" in config:
            bos = special.get("bos_token") if config.get("add_bos_token") else None
            eos = special.get("eos_token") if config.get("add_eos_token") else None
            backend.post_processor = cast(Any, bos_eos_processor(backend, bos, eos))
        return TokenizerParts(backend, special, text_or_none(_chat_template(folder, config)))


def _backend(folder: Path) -> tokenizers.Tokenizer:
    path = folder / "tokenizer.json"
    if not path.is_file():
        if any((folder / name).is_file() for name in ("tokenizer.model", "spiece.model")):
            raise ModelLoadError(
                f"{folder} has a SentencePiece model but no tokenizer.json. Convert it once with transformers: "
                "AutoTokenizer.from_pretrained(folder).save_pretrained(folder)"
            )
        raise ModelLoadError(f"{folder} has no tokenizer.json")
    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # the library raises bare Exceptions, and its panics are not even those
        raise ModelLoadError(f"{path} cannot be read: {error}") from error
    backend.no_truncation()
    backend.no_padding()
    return backend


def _read(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelLoadError(f"{path} is not valid JSON: {error}") from error


def _special_tokens(config: dict[str, Any]) -> dict[str, str]:
    values = {name: config.get(name) for name in _SPECIAL_NAMES}
    texts = {name: value["content"] if isinstance(value, dict) else value for name, value in values.items()}
    return {name: text for name, text in texts.items() if isinstance(text, str)}


def _add_tokens(backend: tokenizers.Tokenizer, config: dict[str, Any], special: dict[str, str]) -> None:
    """Tokens that tokenizer_config.json lists and tokenizer.json does not, in the order of their ids."""
    listed: dict[str, dict[str, Any]] = config.get("added_tokens_decoder", {})
    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    in_order = [token for _, token in sorted(listed.items(), key=lambda item: int(item[0]))]
    backend.add_tokens([_added_token(token) for token in in_order if token["content"] not in known])
    known |= {token["content"] for token in in_order}
    backend.add_special_tokens([text for text in special.values() if text not in known])


def _added_token(token: dict[str, Any]) -> AddedToken:
    flags = {
        name: token[name] for name in ("lstrip", "rstrip", "single_word", "normalized", "special") if name in token
    }
    return AddedToken(token["content"], **flags)


def _chat_template(folder: Path, config: dict[str, Any]) -> Any:
    """chat_template.jinja, else the older places for it."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    template = config.get("chat_template", _read(folder / "chat_template.json").get("chat_template"))
    if isinstance(template, list):
        named = {entry["name"]: entry["template"] for entry in template}
        return named.get("default")
    return template
