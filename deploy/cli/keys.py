"""``warmroot keys``: make, list and revoke the API keys of a file, for ``warmroot serve --api-keys-file``."""

import argparse
import secrets
import sys
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path

from rich.console import Console
from rich.table import Table

from ...cluster.errors import ConfigError
from ...router.tenancy.key_edit import read_text, replace_text, with_key, without_key
from ...router.tenancy.key_file import KeyEntry, moment, read_key_file
from ...router.tenancy.key_ring import hash_text
from .flags import Parser

_SHORTEST = 20
_OPTIONS = ("tenant", "models", "max_priority", "share", "requests_per_minute", "tokens_per_minute", "cache_group")


def main(argv: Sequence[str]) -> int:
    """Run one of the actions."""
    actions = {"add": _add, "list": _list, "revoke": _revoke, "hash": _hash}
    if argv and argv[0] in actions:
        return actions[argv[0]](argv[1:])
    parser = Parser("warmroot keys", "API keys in a file that a running server reads again when it changes.")
    parser.add_argument(
        "action", choices=tuple(actions), metavar="ACTION", help="add, list, revoke or hash; each has --help"
    )
    parser.read(argv or ["--help"])
    return 2


def _add(argv: Sequence[str]) -> int:
    """Make a key, write its hash to the file, and print it this once."""
    parser = Parser("warmroot keys add", "Make a key and print it, once: the file keeps only its hash.")
    _add_name(parser)
    parser.add_argument("--tenant", help="whose cached prefixes are nobody else's")
    parser.add_argument("--models", nargs="+", metavar="MODEL", help="served names that it may use (default: all)")
    parser.add_argument("--max-priority", type=int, metavar="N", help="best priority of its requests; lower runs first")
    parser.add_argument("--share", type=float, metavar="X", help="weight of the tenant in fair sharing (default: 1)")
    parser.add_argument("--requests-per-minute", type=int, metavar="N", help="default: no limit")
    parser.add_argument("--tokens-per-minute", type=int, metavar="N", help="prompt and output (default: no limit)")
    parser.add_argument("--cache-group", help="tenants with the same one share cached prefixes")
    parser.add_argument("--expires", metavar="DATE", help="such as 2027-01-31 or 2027-01-31T12:00:00Z (default: never)")
    parser.add_argument("--admin", action="store_true", help="it opens /admin as well")
    arguments = parser.read(argv)
    key = f"sk-{secrets.token_urlsafe(32)}"
    entry = {"name": arguments.name, "hash": hash_text(key)}
    entry |= {name: value for name in _OPTIONS if (value := getattr(arguments, name)) is not None}
    if arguments.expires is not None:
        entry["expires"] = _moment(arguments.expires)
    if arguments.admin:
        entry["admin"] = True
    replace_text(arguments.file, with_key(read_text(arguments.file), entry, str(arguments.file)))
    print(f"{arguments.name} is in {arguments.file}. Its key, which will not be shown again:", file=sys.stderr)
    print(key)
    return 0


def _list(argv: Sequence[str]) -> int:
    """Show the file's keys."""
    parser = Parser("warmroot keys list", "Show the keys of a file, without their hashes.")
    _add_file(parser)
    arguments = parser.read(argv)
    table = Table("Name", "Tenant", "Models", "Requests/min", "Tokens/min", "State")
    for entry in read_key_file(arguments.file).keys:
        table.add_row(
            entry.name,
            entry.tenant,
            "all" if entry.models is None else " ".join(entry.models),
            str(entry.requests_per_minute or ""),
            str(entry.tokens_per_minute or ""),
            _state(entry, datetime.now(timezone.utc)),
        )
    Console().print(table)
    return 0


def _revoke(argv: Sequence[str]) -> int:
    """Take a key out of the file."""
    parser = Parser("warmroot keys revoke", "Take a key out of a file; servers that read it refuse it within a second.")
    _add_name(parser)
    arguments = parser.read(argv)
    replace_text(arguments.file, without_key(read_text(arguments.file), arguments.name, str(arguments.file)))
    print(f"{arguments.name} opens nothing any more", file=sys.stderr)
    return 0


def _hash(argv: Sequence[str]) -> int:
    """Print the hash of a key of one's own, which is read from standard input."""
    parser = Parser("warmroot keys hash", "Print what belongs under hash: for the key on standard input.")
    parser.read(argv)
    key = sys.stdin.readline().strip()
    if len(key) < _SHORTEST:
        raise ConfigError(f"a key must be random and have at least {_SHORTEST} characters; warmroot keys add makes one")
    print(hash_text(key))
    return 0


def _add_name(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="NAME", help="the key's name")
    _add_file(parser)


def _add_file(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--file", type=Path, required=True, metavar="FILE.yaml", help="the file of keys")


def _moment(text: str) -> datetime:
    try:
        return moment(text)
    except ValueError:
        raise ConfigError(f"--expires: {text!r} is no date such as 2027-01-31", param="expires") from None


def _state(entry: KeyEntry, now: datetime) -> str:
    if entry.disabled:
        return "disabled"
    if entry.expires is not None and entry.expires <= now:
        return "expired"
    words = ["admin"] if entry.admin else []
    return ", ".join([*words, "active" if entry.expires is None else f"until {entry.expires:%Y-%m-%d %H:%M} UTC"])
