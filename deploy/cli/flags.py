"""Flags made from the configuration's fields."""

import argparse
from collections.abc import Iterable, Sequence
from types import UnionType
from typing import Any, Literal, NoReturn, Union, get_args, get_origin

from pydantic import BaseModel, BeforeValidator
from pydantic.fields import FieldInfo

from ...cluster.config import WarmrootConfig
from ...cluster.config_errors import did_you_mean
from ...cluster.errors import ConfigError
from ...cluster.sizes import format_size, parse_size

ALIASES: dict[str, tuple[str, ...]] = {
    "model": ("--model-path",),
    "max_model_len": ("--context-length",),
    "gpu_memory_utilization": ("--mem-fraction-static",),
    "kv_cache_memory": ("--kv-cache-memory-bytes",),
    "max_num_seqs": ("--max-running-requests",),
    "max_num_batched_tokens": ("--chunked-prefill-size",),
    "block_size": ("--page-size",),
    "tensor_parallel_size": ("-tp", "--tp-size", "--tp"),
    "pipeline_parallel_size": ("-pp", "--pp-size", "--pp"),
    "expert_parallel_size": ("-ep", "--ep-size", "--ep"),
    "num_redundant_experts": ("--ep-num-redundant-experts",),
}
"""Other engines' names with the same meaning."""


class Parser(argparse.ArgumentParser):
    """Raises ConfigError, guesses at misspelt flags, and takes ``_`` for ``-`` in their names."""

    def __init__(self, prog: str, description: str) -> None:
        super().__init__(prog=prog, description=description, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        """See ArgumentParser."""
        raise ConfigError(f"{message} (see {self.prog} --help)")

    def read(self, argv: Sequence[str]) -> argparse.Namespace:
        """Parse. Flags may stand before and after positional arguments."""
        arguments, rest = self.parse_known_intermixed_args([_dashes(word) for word in argv])
        if rest:
            flag = rest[0].partition("=")[0]
            guess = did_you_mean(flag, self._option_string_actions) if flag.startswith("-") else ""
            self.error(f"{flag}: unknown {'flag' if flag.startswith('-') else 'argument'}{guess}")
        return arguments


def _dashes(word: str) -> str:
    name, equals, value = word.partition("=")
    return name.replace("_", "-") + equals + value if name.startswith("--") else word


def size(text: str) -> int:
    """Bytes, as argparse reads them: its message shows this function's name."""
    return parse_size(text)


def add_config_flags(parser: argparse.ArgumentParser) -> None:
    """MODEL, ``--config`` and a flag for every key, grouped by section. Flags not given are absent from the result."""
    add_model(parser)
    parser.add_argument(
        "--config", metavar="FILE.yaml", default=None, help="read the same keys from YAML; flags win over it"
    )
    for section in WarmrootConfig.SECTIONS.values():
        group = parser.add_argument_group((section.__doc__ or "").rstrip("."))
        for key in section.model_fields:
            add_key(group, key)
            if key == "enable_prefix_caching":
                group.add_argument(
                    "--disable-radix-cache",
                    dest=key,
                    action="store_false",
                    default=argparse.SUPPRESS,
                    help="same as --no-enable-prefix-caching",
                )


def add_model(parser: argparse.ArgumentParser) -> None:
    """The positional MODEL, which may also come from ``--model`` or a file."""
    description = WarmrootConfig.keys()["model"].description
    parser.add_argument("model", nargs="?", metavar="MODEL", default=argparse.SUPPRESS, help=description)


def add_keys(parser: argparse.ArgumentParser, keys: Iterable[str]) -> None:
    """Flags for some of the keys."""
    for key in keys:
        add_key(parser, key)


def add_key(group: Any, key: str) -> None:
    """One key's flag; its bounds are checked later, by the configuration itself."""
    info = WarmrootConfig.keys()[key]
    names = ("--" + key.replace("_", "-"), *ALIASES.get(key, ()))
    group.add_argument(*names, dest=key, default=argparse.SUPPRESS, help=_help(info), **_reading(info))


def _reading(info: FieldInfo) -> dict[str, Any]:
    """How argparse reads a field's text."""
    kind, validated = _plain(info.annotation)
    if kind is bool:
        return {"action": argparse.BooleanOptionalAction}
    if get_origin(kind) is Literal:
        return {"choices": get_args(kind)}
    if get_origin(kind) is tuple:
        return {"nargs": "+", "action": "extend", "type": str, "metavar": "TEXT"}
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return {"type": str, "metavar": "JSON"}
    if validated or any(isinstance(item, BeforeValidator) for item in info.metadata):
        return {"type": str, "metavar": "SIZE"}
    return {"type": kind, "metavar": {int: "N", float: "X"}.get(kind, "TEXT")}


def _plain(annotation: Any) -> tuple[Any, bool]:
    """(the type without None and Annotated, whether a validator reads texts)."""
    if get_origin(annotation) in (Union, UnionType):
        annotation = next(member for member in get_args(annotation) if member is not type(None))
    metadata = getattr(annotation, "__metadata__", None)
    if metadata is None:
        return annotation, False
    return annotation.__origin__, any(isinstance(item, BeforeValidator) for item in metadata)


def _help(info: FieldInfo) -> str:
    text = (info.description or "").replace("\n", " ").replace("%", "%%").rstrip(".")
    default = info.default
    if info.is_required() or default is None or default in ((), ""):
        return text
    if isinstance(default, tuple):
        default = " ".join(default)
    elif isinstance(default, bool):
        default = "on" if default else "off"
    elif isinstance(default, int) and any(isinstance(item, BeforeValidator) for item in info.metadata):
        default = format_size(default)
    return f"{text} (default: {default})"
