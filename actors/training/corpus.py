"""Texts to learn from, as token ids in a file that grows line by line."""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ...cluster.errors import ConfigError
from ...router.chat_template import ChatTemplate
from ...router.tokenizer import Tokenizer

_MARK = "\N{OBJECT REPLACEMENT CHARACTER}"
_HELD_OUT = 20
"""One text of so many is kept for measuring."""


@dataclass(frozen=True, slots=True)
class Text:
    """One sequence. What stands before ``start`` is context: only what follows is guessed."""

    token_ids: list[int]
    start: int

    @property
    def num_written(self) -> int:
        """Tokens that are guessed."""
        return len(self.token_ids) - self.start


@dataclass(frozen=True, slots=True)
class Turns:
    """A chat template's token ids around what a user says first."""

    opening: list[int]
    """Without a template, the token that begins a text."""
    closing: list[int]
    """From the end of what the user says to the begin of the answer."""

    @classmethod
    def of(cls, tokenizer: Tokenizer, template: ChatTemplate | None) -> "Turns":
        """Raises ConfigError for a template that does not show what the user says, or if nothing begins a text."""
        if template is None:
            begin = tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id
            if begin is None:
                raise ConfigError("--data: needed for a model without a chat template and a token that begins a text")
            return cls([begin], [])
        before, mark, after = template.render([{"role": "user", "content": _MARK}]).partition(_MARK)
        if not mark:
            raise ConfigError("--data: needed for a model whose chat template does not show what the user says")
        return cls(tokenizer.encode(before, False), tokenizer.encode(after, False))

    def prompt(self, said: Sequence[int]) -> list[int]:
        """What an answer follows."""
        return [*self.opening, *said, *self.closing]


class Corpus:
    """A file of texts, one JSON object a line. Made anew or gone on with."""

    def __init__(self, path: Path) -> None:
        """Raises ConfigError for a file of something else."""
        self._path = path
        self.texts = _read(path) if path.exists() else []

    @property
    def num_written(self) -> int:
        """Tokens to learn from, in all texts."""
        return sum(text.num_written for text in self.texts)

    def add(self, texts: Iterable[Text]) -> Iterator[Text]:
        """Append texts and pass them on."""
        with self._path.open("a", encoding="utf-8") as file:
            for text in texts:
                file.write(json.dumps(asdict(text), separators=(",", ":")) + "\n")
                self.texts.append(text)
                yield text

    def split(self) -> tuple[list[Text], list[Text]]:
        """(texts to learn from, texts to measure with)."""
        held_out = self.texts[::_HELD_OUT]
        return [text for index, text in enumerate(self.texts) if index % _HELD_OUT], held_out


def read_data(path: Path, tokenizer: Tokenizer, turns: Turns, window: int) -> tuple[list[Text], list[list[int]]]:
    """The user's own file: (whole texts, prompts that the model is to answer).

    JSON lines have ``text`` or ``prompt``; anything else is one text, cut into windows. Raises ConfigError.
    """
    if path.suffix != ".jsonl":
        return list(_windows(tokenizer.encode(path.read_text(encoding="utf-8"), False), window)), []
    texts: list[Text] = []
    prompts: list[list[int]] = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        record = _record(path, number, line)
        if isinstance(record.get("text"), str):
            texts += _windows(tokenizer.encode(record["text"], False), window)
        elif isinstance(record.get("prompt"), str):
            prompts.append(turns.prompt(tokenizer.encode(record["prompt"], False)))
        else:
            raise ConfigError(f'{path}, line {number}: expected an object with a string "text" or "prompt"')
    return texts, prompts


def _windows(token_ids: list[int], window: int) -> Iterator[Text]:
    for start in range(0, len(token_ids), window):
        yield Text(token_ids[start : start + window], 0)


def _record(path: Path, number: int, line: str) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"{path}, line {number}: not JSON: {error}") from error
    return record if isinstance(record, dict) else {}


def _read(path: Path) -> list[Text]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
        return [Text(**json.loads(line)) for line in lines]
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{path}: not a file of texts made by an earlier run ({error}): remove it") from error
