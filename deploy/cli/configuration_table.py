"""The tables of docs/configuration.md, made from the configuration and its flags.

    python -m warmroot.deploy.cli.configuration_table docs/configuration.md

puts them in place of those that stand between the two marks there.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from annotated_types import Ge, Gt, Le, Lt
from pydantic import BeforeValidator
from pydantic.fields import FieldInfo

from ...cluster.config import WarmrootConfig
from ...cluster.config_section import Section
from ...cluster.sizes import format_size
from .flags import Parser, add_config_flags

BEGIN, END = "<!-- keys: begin -->\n", "<!-- keys: end -->\n"
_WORDS = {"N": "integer", "X": "number", "SIZE": "size", "TEXT": "text", "JSON": "JSON or mapping"}


def main(argv: Sequence[str]) -> int:
    """Rewrite the tables in the file that ``argv`` names."""
    path = Path(argv[0])
    path.write_text(updated(path.read_text(encoding="utf-8")), encoding="utf-8")
    return 0


def updated(text: str) -> str:
    """``text`` with the tables of today. Raises ValueError when the marks are missing."""
    before, rest = _cut(text, BEGIN)
    _, after = _cut(rest, END)
    return f"{before}{BEGIN}\n{render()}\n{END}{after}"


def render() -> str:
    """A Markdown table for every section."""
    parser = Parser("warmroot serve", "")
    add_config_flags(parser)
    flags: dict[str, list[argparse.Action]] = {}
    for action in parser._actions:  # argparse tells of its flags in no other way
        if action.option_strings:
            flags.setdefault(action.dest, []).append(action)
    return "\n".join(_table(section, flags) for section in WarmrootConfig.SECTIONS.values())


def _table(section: type[Section], flags: dict[str, list[argparse.Action]]) -> str:
    rows = [_row(key, info, flags[key]) for key, info in section.model_fields.items()]
    title = (section.__doc__ or "").rstrip(".")
    head = "| key | flag | type | default | meaning |\n|---|---|---|---|---|\n"
    return f"### {title}\n\n{head}{''.join(rows)}"


def _row(key: str, info: FieldInfo, actions: list[argparse.Action]) -> str:
    names = [name for action in actions for name in action.option_strings]
    flag = ", ".join(f"`{name}`" for name in names)
    meaning = (info.description or "").replace("\n", " ").replace("|", "\\|")
    return f"| `{key}` | {flag} | {_type(info, actions[0])} | {_default(info)} | {meaning} |\n"


def _type(info: FieldInfo, action: argparse.Action) -> str:
    if action.choices is not None:
        return ", ".join(f"`{choice}`" for choice in action.choices)
    if action.nargs == "+":
        return "list of texts"
    if isinstance(action, argparse.BooleanOptionalAction):
        return "boolean"
    return " ".join([_WORDS[str(action.metavar)], _bounds(info)]).strip()


def _bounds(info: FieldInfo) -> str:
    words: list[str] = []
    for bound in info.metadata:
        match bound:
            case Ge(ge=least):
                words.append(f"≥ {least}")
            case Gt(gt=below):
                words.append(f"> {below}")
            case Le(le=most):
                words.append(f"≤ {most}")
            case Lt(lt=above):
                words.append(f"< {above}" if above != 2**63 else "< 2^63")
            case _:
                pass
    return ", ".join(words)


def _default(info: FieldInfo) -> str:
    default = info.default
    if info.is_required():
        return "required"
    if default is None or default in ((), ""):
        return ""
    if isinstance(default, bool):
        return f"`{str(default).lower()}`"
    if isinstance(default, tuple):
        return ", ".join(f"`{item}`" for item in default)
    is_size = any(isinstance(item, BeforeValidator) for item in info.metadata)
    return format_size(default) if isinstance(default, int) and is_size else f"`{default}`"


def _cut(text: str, mark: str) -> tuple[str, str]:
    before, found, after = text.partition(mark)
    if not found:
        raise ValueError(f"{mark.strip()} is missing")
    return before, after


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
