"""Texts that a model is calibrated with: token ids in samples of one length."""

import ast
import random
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path

from ...cluster.errors import ConfigError

BUILTIN = "builtin"
_SKIPPED = ("site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "pydoc_data")
"""``pydoc_data`` is what ``warmroot bench`` scores: nothing is calibrated on it."""
_CHARACTERS_PER_TOKEN = 8
"""More than any text has: the files are read until there is enough."""


def calibration_samples(
    encode: Callable[[str], list[int]], source: str, *, num_samples: int, length: int, seed: int = 0
) -> list[list[int]]:
    """``num_samples`` pieces of ``length`` tokens of a text file, or of the docstrings of Python's library (builtin).

    Raises ConfigError when the file cannot be read or the text is too short.
    """
    if num_samples < 1:
        raise ConfigError(f"--samples: should be at least 1, not {num_samples}", param="samples")
    if length < 16:
        raise ConfigError(f"--length: should be at least 16 tokens, not {length}", param="length")
    rng = random.Random(seed)
    wanted = _CHARACTERS_PER_TOKEN * num_samples * length
    tokens = encode(_builtin_text(rng, wanted) if source == BUILTIN else _read(source))
    available = len(tokens) // length
    if available < num_samples:
        raise ConfigError(
            f"--calibration: {source} has {len(tokens)} tokens, which is {available} samples of {length}; give more"
            f" text, or a smaller --samples or --length",
            param="calibration",
        )
    # Spread over the whole text.
    starts = sorted(rng.sample(range(available), num_samples))
    return [tokens[start * length : (start + 1) * length] for start in starts]


def _read(name: str) -> str:
    try:
        return Path(name).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--calibration: {name}: {error}", param="calibration") from error


def _builtin_text(rng: random.Random, num_characters: int) -> str:
    """Paragraphs of prose from the docstrings of Python's library, shuffled, so that no module fills a sample."""
    root = Path(sysconfig.get_path("stdlib"))
    files = sorted(path for path in root.rglob("*.py") if not set(path.relative_to(root).parts) & set(_SKIPPED))
    rng.shuffle(files)
    paragraphs: dict[str, None] = {}
    while files and sum(map(len, paragraphs)) < num_characters:
        paragraphs |= dict.fromkeys(_prose(files.pop()))
    text = list(paragraphs)
    rng.shuffle(text)
    return "\n\n".join(text)


def _prose(path: Path) -> Iterator[str]:
    try:
        tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            for paragraph in (ast.get_docstring(node) or "").split("\n\n"):
                text = " ".join(paragraph.split())
                if len(text) > 120 and text[0].isalpha() and text.endswith(".") and ">>>" not in text:
                    yield text
