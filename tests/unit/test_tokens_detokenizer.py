"""Pieces of text: whole characters only, and together the whole output."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from small_tokenizers import byte_level, sentencepiece, word_level

from warmroot.router.detokenizer import Detokenizer, WindowDetokenizer
from warmroot.router.tokenizer import Tokenizer

BYTES = byte_level()
PIECES = sentencepiece()
WHOLE = sentencepiece(strip=False)
WORDS = word_level()


def pieces(detokenizer: Detokenizer, steps: list[list[int]]) -> list[str]:
    return [*(detokenizer.push(step) for step in steps), detokenizer.flush()]


def one_by_one(tokenizer: Tokenizer, ids: list[int], skip: bool = True) -> list[str]:
    return pieces(tokenizer.detokenizer(skip), [[token_id] for token_id in ids])


def ids_of(tokenizer: Tokenizer) -> st.SearchStrategy[list[int]]:
    return st.lists(st.integers(0, tokenizer.vocab_size + 3), max_size=40)


@given(ids_of(BYTES), st.booleans())
@example([0xE2, 0x82, 0xAC, 0xE2, 0x82], True)
@example([0xF0, 0x9F, 0x41, 0x80, 0xC0, 0xED, 0xA0, 0x80, 0xF5], True)
def test_byte_level_pieces_are_the_whole(ids: list[int], skip: bool) -> None:
    assert "".join(one_by_one(BYTES, ids, skip)) == BYTES.decode(ids, skip)


@given(ids_of(BYTES), st.lists(st.integers(1, 5)))
def test_steps_do_not_matter(ids: list[int], sizes: list[int]) -> None:
    steps, rest = [], ids
    for size in sizes:
        steps.append(rest[:size])
        rest = rest[size:]
    assert "".join(pieces(BYTES.detokenizer(), [*steps, rest])) == BYTES.decode(ids)


@given(st.text(max_size=30))
@example("naïve 😀😀 日本語 \u200b")
def test_only_whole_characters(text: str) -> None:
    ids = BYTES.encode(text.replace("\ufffd", ""))
    assert not any("\ufffd" in piece for piece in one_by_one(BYTES, ids))


def test_a_character_comes_with_its_last_byte() -> None:
    assert one_by_one(BYTES, list("a€".encode())) == ["a", "", "", "€", ""]
    assert one_by_one(BYTES, list("€".encode()[:2])) == ["", "", "\ufffd"]
    assert one_by_one(BYTES, [*"€".encode()[:2], ord("x")]) == ["", "", "\ufffdx", ""]


@given(st.text(alphabet=st.sampled_from("ab helowrd.é€😀日\n"), max_size=40))
def test_sentencepiece_text_comes_back(text: str) -> None:
    """With the space that every text begins with, since an output goes on after a prompt."""
    ids = PIECES.encode(text, add_special_tokens=False)
    whole = "".join(one_by_one(PIECES, ids))
    assert whole == WHOLE.decode(ids)
    assert whole.removeprefix(" ") == PIECES.decode(ids)
    assert not any("\ufffd" in piece for piece in one_by_one(PIECES, ids))


@given(st.lists(st.one_of(st.integers(0, 2), st.integers(259, WHOLE.vocab_size + 2), st.integers(3, 130))))
def test_sentencepiece_tokens_and_ascii_bytes(ids: list[int]) -> None:
    assert "".join(one_by_one(PIECES, ids)) == WHOLE.decode(ids)


@given(ids_of(PIECES))
def test_sentencepiece_invalid_bytes_do_not_spread(ids: list[int]) -> None:
    """The library turns a whole run of byte tokens into U+FFFD when one is wrong, which no stream can do."""
    spelled = b"".join(PIECES.token_bytes(i) for i in ids if i not in PIECES.special_ids)
    assert "".join(one_by_one(PIECES, ids)) == spelled.decode("utf-8", "replace")


def test_byte_fallback_run() -> None:
    ids = [3 + byte for byte in "😀é".encode()]
    assert one_by_one(PIECES, ids) == ["", "", "", "😀", "", "é", ""]


def test_special_tokens() -> None:
    start, end = BYTES.encode("<|im_start|>"), BYTES.encode("<|im_end|>")
    assert one_by_one(BYTES, [*start, ord("a"), *end]) == ["", "a", "", ""]
    assert one_by_one(BYTES, [*start, ord("a"), *end], skip=False) == ["<|im_start|>", "a", "<|im_end|>", ""]
    assert one_by_one(BYTES, BYTES.encode("<think>")) == ["<think>", ""]


@given(ids_of(WORDS))
def test_other_decoders_go_through_a_window(ids: list[int]) -> None:
    detokenizer = WORDS.detokenizer()
    assert isinstance(detokenizer, WindowDetokenizer)
    known = [token_id for token_id in ids if token_id < WORDS.vocab_size]
    assert "".join(pieces(detokenizer, [[i] for i in known])) == WORDS.decode(known)


@given(st.lists(st.integers(0, 255), max_size=40))
def test_window_agrees_on_valid_text(raw: list[int]) -> None:
    ids = BYTES.encode(bytes(raw).decode("utf-8", "ignore"))
    window = WindowDetokenizer(BYTES.decode)
    assert "".join(pieces(window, [[i] for i in ids])) == BYTES.decode(ids)


def test_window_stays_short() -> None:
    lengths: list[int] = []

    def decode(ids: list[int]) -> str:
        lengths.append(len(ids))
        return BYTES.decode(ids)

    window = WindowDetokenizer(decode)
    end = BYTES.eos_token_id
    assert end is not None
    for token_id in [*[end] * 500, *b"abc" * 100]:
        window.push([token_id])
    assert max(lengths) <= 34


@pytest.mark.parametrize("tokenizer", [BYTES, PIECES])
def test_unknown_ids_are_silent(tokenizer: Tokenizer) -> None:
    assert one_by_one(tokenizer, [tokenizer.vocab_size + 7]) == ["", ""]
    assert tokenizer.token_bytes(tokenizer.vocab_size + 7) == b""
