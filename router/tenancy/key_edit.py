"""Changes to the text of a key file that leave everything else in it as it was: comments, order, other fields."""

import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from ...cluster.errors import ConfigError
from .key_file import parse_key_file, read_key_text

_MODE = 0o600


def with_key(text: str, entry: Mapping[str, Any], name: str) -> str:
    """``text`` with one more entry. Raises ConfigError when that would not be a key file; ``name`` is the file's."""
    before = parse_key_file(text, name)
    block = yaml.safe_dump([dict(entry)], sort_keys=False, allow_unicode=True)
    node = _keys_node(text, name)
    if node is None:
        changed = f"{text.rstrip()}\nkeys:\n{block}".lstrip()
    else:
        lines = text.splitlines(keepends=True)
        if before.keys:
            at, indent = _end_of(node), node.start_mark.column
        else:  # ``keys: []`` or ``keys:``
            at, indent = node.start_mark.line + 1, 0
            lines[at - 1] = "keys:\n"
        if not lines[at - 1].endswith("\n"):
            lines[at - 1] += "\n"
        lines[at:at] = [" " * indent + line for line in block.splitlines(keepends=True)]
        changed = "".join(lines)
    return _checked(changed, name, len(before.keys) + 1)


def without_key(text: str, key_name: str, name: str) -> str:
    """``text`` without the entry of that name. Raises ConfigError when there is none."""
    before = parse_key_file(text, name)
    places = [place for place, entry in enumerate(before.keys) if entry.name == key_name]
    node = _keys_node(text, name)
    if not places or node is None:
        raise ConfigError(f"{name}: has no key {key_name!r}", param="name")
    lines = text.splitlines(keepends=True)
    entry = node.value[places[0]]
    begin = entry.start_mark.line
    while not lines[begin].lstrip().startswith("-"):
        begin -= 1
    del lines[begin : _end_of(entry)]
    return _checked("".join(lines), name, len(before.keys) - 1)


def read_text(path: Path) -> str:
    """What the file says; nothing where there is none yet. Raises ConfigError."""
    return read_key_text(path) if path.exists() else ""


def replace_text(path: Path, text: str) -> None:
    """Put ``text`` there in one step, readable by its owner only: nobody ever sees half a file."""
    real = Path(os.path.realpath(path))
    temporary = real.with_name(f".{real.name}.{secrets.token_hex(4)}")
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, _MODE)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(descriptor)
        os.replace(temporary, real)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise ConfigError(f"{path}: {error.strerror}", param="file") from error


def _keys_node(text: str, name: str) -> Any:
    """The sequence of keys; None where the file has none. Raises ConfigError when it is written in one line."""
    root = yaml.compose(text, Loader=yaml.SafeLoader)
    if not isinstance(root, yaml.MappingNode):
        return None
    node = next((value for key, value in root.value if key.value == "keys"), None)
    if isinstance(node, yaml.SequenceNode) and node.flow_style and node.value:
        reason = "keys: write one entry to a line, each beginning with -, so that this command can change them"
        raise ConfigError(f"{name}:{node.start_mark.line + 1}: {reason}", param="file")
    return node


def _end_of(node: Any) -> int:
    """The line after its last one. A block's own mark is where the next thing begins, below comments of that."""
    if isinstance(node, yaml.CollectionNode) and not node.flow_style:
        last = node.value[-1]
        return _end_of(last[1] if isinstance(last, tuple) else last)
    return node.end_mark.line + 1


def _checked(text: str, name: str, num_keys: int) -> str:
    found = parse_key_file(text, name)
    if len(found.keys) != num_keys:
        raise ConfigError(f"{name}: cannot be changed by this command; edit it by hand", param="file")
    return text
