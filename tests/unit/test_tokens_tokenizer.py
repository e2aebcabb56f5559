"""Tokenizers from folders, from GGUF files, and from their card."""

import json
from pathlib import Path
from typing import Any

import gguf
import pytest
from small_tokenizers import CHATML, byte_level, sentencepiece

from warmroot.cluster.errors import ConfigError, ModelLoadError
from warmroot.router.byte_alphabet import BYTE_TO_CHAR
from warmroot.router.tokenizer import Tokenizer

SPACE = "\u2581"


def write_folder(folder: Path, config: dict[str, Any] | None = None, tokenizer: Tokenizer | None = None) -> Path:
    card = (tokenizer or byte_level()).to_dict()
    (folder / "tokenizer.json").write_text(card["tokenizer"], encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(config or {}), encoding="utf-8")
    return folder


def write_gguf(path: Path, model: str, tokens: list[str], types: list[int], **more: Any) -> Path:
    writer = gguf.GGUFWriter(path, more.pop("architecture", "llama"))
    writer.add_tokenizer_model(model)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    for name, value in more.items():
        getattr(writer, f"add_{name}")(value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def byte_level_gguf(path: Path, pre: str, **more: Any) -> Path:
    tokens = [*(BYTE_TO_CHAR[byte] for byte in range(256)), "he", "ll", "hell", "hello", "<|end|>", "<think>"]
    types = [1] * (len(tokens) - 2) + [3, 4]
    merges = ["h e", "l l", "he ll", "hell o"]
    return write_gguf(path, "gpt2", tokens, types, tokenizer_pre=pre, token_merges=merges, **more)


def sentencepiece_gguf(path: Path, **more: Any) -> Path:
    words = [SPACE, "h", "i", "t", "hi", f"{SPACE}h", f"{SPACE}hi", "it", SPACE * 2]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words, "<tool>"]
    types = [2, 3, 3, *[6] * 256, *[1] * len(words), 4]
    scores = [0.0] * 259 + [-10.0, -11.0, -12.0, -13.0, -2.0, -1.0, -3.0, -4.0, -5.0, 0.0]
    facts = {"bos_token_id": 1, "eos_token_id": 2, "unk_token_id": 0, "token_scores": scores}
    return write_gguf(path, "llama", tokens, types, **{**facts, **more})


def spelled(tokenizer: Tokenizer, text: str, **options: Any) -> list[str]:
    return [tokenizer.token_text(token_id) for token_id in tokenizer.encode(text, **options)]


# Folders


def test_folder(tmp_path: Path) -> None:
    config = {"bos_token": {"content": "<|im_start|>"}, "eos_token": "<|im_end|>", "chat_template": CHATML}
    tokenizer = Tokenizer.from_path(write_folder(tmp_path, config))
    same = byte_level()
    assert tokenizer.encode("hello <|im_end|> é") == same.encode("hello <|im_end|> é")
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (same.bos_token_id, same.eos_token_id)
    assert tokenizer.special_ids == same.special_ids
    assert tokenizer.vocab_size == same.vocab_size == max(same.encode("<think>")) + 1
    assert tokenizer.chat_template == CHATML


@pytest.mark.parametrize(
    ("bos", "eos", "added"), [(True, False, (True, False)), (True, True, (True, True)), (False, False, (False, False))]
)
def test_add_bos_and_eos(tmp_path: Path, bos: bool, eos: bool, added: tuple[bool, bool]) -> None:
    config = {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": bos, "add_eos_token": eos}
    tokenizer = Tokenizer.from_path(write_folder(tmp_path, config, sentencepiece()))
    ids = tokenizer.encode("the end")
    assert (ids[0] == 1, ids[-1] == 2) == added
    assert 1 not in tokenizer.encode("the end", add_special_tokens=False)


def test_special_tokens_map_and_added_tokens(tmp_path: Path) -> None:
    first = byte_level().vocab_size
    listed = {
        str(first + 1): {"content": "<b>", "special": False, "normalized": False},
        str(first): {"content": "<a>", "special": True, "normalized": False},
    }
    write_folder(tmp_path, {"added_tokens_decoder": listed})
    (tmp_path / "special_tokens_map.json").write_text('{"eos_token": {"content": "<eot>"}}')
    tokenizer = Tokenizer.from_path(tmp_path)
    assert tokenizer.encode("<a><b><eot>") == [first, first + 1, first + 2]
    assert tokenizer.eos_token_id == first + 2
    assert tokenizer.decode([first, first + 1, first + 2]) == "<b>"


def test_chat_template_places(tmp_path: Path) -> None:
    named = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    assert Tokenizer.from_path(write_folder(tmp_path, {"chat_template": named})).chat_template == "D"
    (tmp_path / "tokenizer_config.json").write_text("{}")
    assert Tokenizer.from_path(tmp_path).chat_template is None
    (tmp_path / "chat_template.json").write_text('{"chat_template": "J"}')
    assert Tokenizer.from_path(tmp_path).chat_template == "J"
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}")
    assert Tokenizer.from_path(tmp_path).chat_template == "{{ messages }}"
    assert Tokenizer.from_path(tmp_path, "{{ mine }}").chat_template == "{{ mine }}"
    (tmp_path / "own.jinja").write_text("from a file")
    assert Tokenizer.from_path(tmp_path, str(tmp_path / "own.jinja")).chat_template == "from a file"
    with pytest.raises(ConfigError, match="no chat template at nowhere"):
        Tokenizer.from_path(tmp_path, "nowhere")


def test_truncation_and_padding_are_off(tmp_path: Path) -> None:
    write_folder(tmp_path)
    values = json.loads((tmp_path / "tokenizer.json").read_text(encoding="utf-8"))
    values["truncation"] = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    (tmp_path / "tokenizer.json").write_text(json.dumps(values))
    assert len(Tokenizer.from_path(tmp_path).encode("abcdefgh")) == 8


def test_folders_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"no tokenizer.json"):
        Tokenizer.from_path(tmp_path)
    (tmp_path / "tokenizer.model").touch()
    with pytest.raises(ModelLoadError, match=r"Convert it once with transformers"):
        Tokenizer.from_path(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ModelLoadError, match=r"tokenizer.json cannot be read"):
        Tokenizer.from_path(tmp_path)
    with pytest.raises(ModelLoadError, match="no tokenizer at"):
        Tokenizer.from_path(tmp_path / "nothing.gguf")


# Cards and tokens


@pytest.mark.parametrize("make", [byte_level, sentencepiece])
def test_card_round_trip(make: Any) -> None:
    tokenizer = make()
    card = json.loads(json.dumps(tokenizer.to_dict()))
    same = Tokenizer.from_dict(card)
    text = "hello <s> <|im_start|> naïve 😀"
    assert same.encode(text) == tokenizer.encode(text)
    assert same.chat_template == tokenizer.chat_template
    assert same.special_ids == tokenizer.special_ids
    assert same.eos_token_id == tokenizer.eos_token_id


def test_token_bytes() -> None:
    tokenizer = byte_level()
    assert b"".join(tokenizer.token_bytes(i) for i in tokenizer.encode("hello é😀\n")) == "hello é😀\n".encode()
    assert tokenizer.token_text(0xC3) == "\ufffd"
    assert tokenizer.token_text(tokenizer.encode("<|im_end|>")[0]) == "<|im_end|>"
    pieces = sentencepiece()
    assert [pieces.token_bytes(i) for i in pieces.encode("the €", add_special_tokens=False)] == [
        b" the", b" ", b"\xe2", b"\x82", b"\xac"
    ]  # fmt: skip


# GGUF


@pytest.mark.parametrize(
    ("pre", "words"),
    [
        ("default", ["I", "'ll", " buy", " ", " 12345", " apples", "!!", "\n\n"]),
        ("smollm", ["I", "'ll", " buy", "  ", "1", "2", "3", "4", "5", " apples", "!!", "\n\n"]),
        ("llama-bpe", ["I", "'ll", " buy", " ", " ", "123", "45", " apples", "!!\n\n"]),
        ("qwen2", ["I", "'ll", " buy", " ", " ", "1", "2", "3", "4", "5", " apples", "!!\n\n"]),
        ("tekken", ["I", "'ll", " buy", " ", " ", "1", "2", "3", "4", "5", " apples", "!!\n\n"]),
        ("deepseek-v3", ["I", "'ll", " buy", "  ", "123", "45", " apples", "!!\n\n"]),
    ],
)
def test_gguf_splits(tmp_path: Path, pre: str, words: list[str]) -> None:
    tokenizer = Tokenizer.from_path(byte_level_gguf(tmp_path / "m.gguf", pre))
    split: Any = json.loads(tokenizer.to_dict()["tokenizer"])["pre_tokenizer"]
    assert split["pretokenizers"][-1]["type"] == "ByteLevel"
    pieces = tokenizer._backend.pre_tokenizer.pre_tokenize_str("I'll buy  12345 apples!!\n\n")
    assert [bytes(CHARS[char] for char in piece).decode() for piece, _ in pieces] == words


CHARS = {char: byte for byte, char in BYTE_TO_CHAR.items()}


def test_gguf_byte_level(tmp_path: Path) -> None:
    path = byte_level_gguf(
        tmp_path / "m.gguf", "gpt-2", eos_token_id=260, bos_token_id=260, add_bos_token=True, chat_template=CHATML
    )
    tokenizer = Tokenizer.from_path(path)
    assert tokenizer.encode("hello<|end|><think>h", add_special_tokens=False) == [259, 260, 261, ord("h")]
    assert tokenizer.encode("hello") == [260, 259]
    assert tokenizer.decode([260, 259, 261]) == "hello<think>"
    assert tokenizer.special_ids == {260}
    assert tokenizer.vocab_size == 262
    assert tokenizer.chat_template == CHATML
    assert Tokenizer.from_path(path, "{{ mine }}").chat_template == "{{ mine }}"


def test_gguf_sentencepiece(tmp_path: Path) -> None:
    """Merges follow scores: "▁h" (-1) is joined before "hi" (-2)."""
    tokenizer = Tokenizer.from_path(sentencepiece_gguf(tmp_path / "m.gguf"))
    assert spelled(tokenizer, "hi hit") == ["<s>", " hi", " hi", "t"]
    assert spelled(tokenizer, "ithi") == ["<s>", " ", "it", "hi"]
    assert spelled(tokenizer, "é", add_special_tokens=False) == [" ", "\ufffd", "\ufffd"]
    assert tokenizer.decode(tokenizer.encode("hi hit é")) == "hi hit é"
    assert tokenizer.encode("hi<tool>", add_special_tokens=False)[-1] == tokenizer.vocab_size - 1


def test_gguf_gemma(tmp_path: Path) -> None:
    """Merges follow the file's order, whatever its scores: "hi" comes before "it"."""
    scores = [*[0.0] * 266, -1.0, *[-9.0] * 2]
    path = sentencepiece_gguf(tmp_path / "m.gguf", architecture="gemma3", add_bos_token=False, token_scores=scores)
    tokenizer = Tokenizer.from_path(path)
    assert spelled(tokenizer, "hit") == ["hi", "t"]
    assert spelled(tokenizer, "hi  t") == ["hi", "  ", "t"]
    assert tokenizer.decode(tokenizer.encode(" hi")) == " hi"


def test_gguf_without_prefix_space(tmp_path: Path) -> None:
    path = sentencepiece_gguf(tmp_path / "m.gguf", add_space_prefix=False, add_bos_token=False)
    tokenizer = Tokenizer.from_path(path)
    assert spelled(tokenizer, "hi hi") == ["hi", " hi"]
    assert tokenizer.decode(tokenizer.encode(" hi")) == " hi"


def test_gguf_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="text split 'own' is not known"):
        Tokenizer.from_path(byte_level_gguf(tmp_path / "a.gguf", "own"))
    with pytest.raises(ModelLoadError, match="tokenizer 'bert' is not supported"):
        Tokenizer.from_path(write_gguf(tmp_path / "b.gguf", "bert", ["a"], [1]))
    (tmp_path / "c.gguf").write_bytes(b"GGUF\x03\x00\x00\x00")
    (tmp_path / "d.gguf").write_bytes(b"PK\x03\x04 a zip file, maybe")
    for name in ("c.gguf", "d.gguf"):
        with pytest.raises(ModelLoadError, match="cannot be read as GGUF"):
            Tokenizer.from_path(tmp_path / name)
