"""The file of API keys: YAML that names holders and hashes, never a key.

keys:
  - name: alice
    tenant: acme
    hash: sha256:5f8d…
    models: [smollm2]
tenants:
  acme: {tokens_per_minute: 100000}
"""

import re
from collections.abc import Iterator, Mapping
from datetime import date, datetime, timezone
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from ...cluster.errors import ConfigError
from .key_ring import HASH_PREFIX, HeldKey, KeyRing
from .principal import Principal

_HASH = re.compile(HASH_PREFIX + "[0-9a-f]{64}")
_NAME = r"^[A-Za-z0-9._@:+\-]{1,64}$"
_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def moment(value: Any) -> Any:
    """YAML makes dates and times of what looks like one, unless it stands in quotes."""
    if isinstance(value, str):
        value = datetime.fromisoformat(value.replace("Z", "+00:00"))
    elif isinstance(value, date) and not isinstance(value, datetime):
        value = datetime(value.year, value.month, value.day)
    return value.replace(tzinfo=timezone.utc) if isinstance(value, datetime) and value.tzinfo is None else value


class _Entry(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True)


class KeyEntry(_Entry):
    """One key."""

    name: str = Field(pattern=_NAME)
    """Of the key, for logs and for ``warmroot keys``."""
    hash: str
    """``sha256:`` and the digest of the key, as ``warmroot keys add`` and ``warmroot keys hash`` write it."""
    tenant: str = Field("", max_length=64)
    """Whose cached prefixes are nobody else's. Without one: shared with all who have none."""
    models: list[str] | None = None
    """Served names that it may use. Default: all."""
    max_priority: int | None = None
    """Best priority that its requests get, as lower runs first. Default: any."""
    share: float = Field(1.0, gt=0, le=1000)
    """Weight of the tenant where tenants compete."""
    requests_per_minute: int | None = Field(None, ge=1)
    """Default: no limit."""
    tokens_per_minute: int | None = Field(None, ge=1)
    """Prompt and output together. Default: no limit."""
    expires: Annotated[datetime | None, BeforeValidator(moment)] = None
    """Date or time from which it opens nothing; UTC unless it says otherwise. Default: never."""
    disabled: bool = False
    """Opens nothing for now."""
    admin: bool = False
    """Opens ``/admin`` too."""
    cache_group: str = Field("", max_length=64)
    """Tenants with the same one share cached prefixes, and thereby learn from response times what others have asked."""


class TenantEntry(_Entry):
    """What all keys of a tenant may have together."""

    requests_per_minute: int | None = Field(default=None, ge=1)
    """Default: no limit."""
    tokens_per_minute: int | None = Field(default=None, ge=1)
    """Default: no limit."""


class KeyFile(_Entry):
    """The whole file."""

    keys: Annotated[list[KeyEntry], BeforeValidator(lambda given: given or [])] = Field(default_factory=list[KeyEntry])
    tenants: Annotated[dict[str, TenantEntry], BeforeValidator(lambda given: given or {})] = Field(
        default_factory=dict[str, TenantEntry]
    )

    def ring(self) -> KeyRing:
        """The keys that are not disabled."""
        return KeyRing({_digest(entry): self._held(entry) for entry in self.keys if not entry.disabled})

    def _held(self, entry: KeyEntry) -> HeldKey:
        return HeldKey(self._principal(entry), entry.expires and entry.expires.timestamp())

    def _principal(self, entry: KeyEntry) -> Principal:
        together = self.tenants.get(entry.tenant, TenantEntry()) if entry.tenant else TenantEntry()
        return Principal(
            tenant=entry.tenant,
            name=entry.name,
            models=None if entry.models is None else frozenset(entry.models),
            max_priority=entry.max_priority,
            share=entry.share,
            requests_per_minute=entry.requests_per_minute,
            tokens_per_minute=entry.tokens_per_minute,
            is_admin=entry.admin,
            cache_group=entry.cache_group,
            tenant_requests_per_minute=together.requests_per_minute,
            tenant_tokens_per_minute=together.tokens_per_minute,
        )


def read_key_file(path: Path) -> KeyFile:
    """Raises ConfigError naming line and field, and no value: a key may stand where a hash belongs."""
    return parse_key_file(read_key_text(path), str(path))


def read_key_text(path: Path) -> str:
    """What the file says. Raises ConfigError."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise ConfigError(f"{path}: {reason}", param="api_keys_file") from None


def parse_key_file(text: str, name: str) -> KeyFile:
    """See ``read_key_file``; ``name`` is the file's, for messages."""
    root, values = _composed(text, name)
    if root is None:
        return KeyFile()
    try:
        found = KeyFile.model_validate(values)
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False)[0]
        raise _mistake(name, root, first["loc"], _reason(first)) from None
    _check_each(found, name, root)
    return found


def _composed(text: str, name: str) -> tuple[yaml.Node | None, Any]:
    """(the nodes, which know their lines; the values)."""
    loader = _Loader(text)
    try:
        root = loader.get_single_node()
        if root is None:
            return None, None
        for twice in _repeated(root):
            raise _at(name, twice, f"{twice.value}: stands here twice")
        return root, loader.construct_document(root)
    except yaml.MarkedYAMLError as error:
        line = f":{error.problem_mark.line + 1}" if error.problem_mark else ""
        raise ConfigError(
            f"{name}{line}: not valid YAML: {error.problem or error.context}", param="api_keys_file"
        ) from None
    except (yaml.YAMLError, ValueError) as error:
        reason = str(error).partition("\n")[0]
        raise ConfigError(f"{name}: not valid YAML: {reason}", param="api_keys_file") from None
    except RecursionError:
        raise ConfigError(f"{name}: nested too deeply", param="api_keys_file") from None
    finally:
        loader.dispose()


def _check_each(found: KeyFile, name: str, root: yaml.Node) -> None:
    names: dict[str, int] = {}
    hashes: dict[str, int] = {}
    for place, entry in enumerate(found.keys):
        if _HASH.fullmatch(entry.hash) is None:
            reason = "must be sha256: and 64 hexadecimal digits (warmroot keys hash makes it from a key)"
            raise _mistake(name, root, ("keys", place, "hash"), reason)
        for field, value, seen in (("name", entry.name, names), ("hash", entry.hash, hashes)):
            before = seen.setdefault(value, place)
            if before != place:
                line = _node(root, ("keys", before, field)).start_mark.line + 1
                raise _mistake(name, root, ("keys", place, field), f"is the same as in line {line}")


def _digest(entry: KeyEntry) -> bytes:
    return bytes.fromhex(entry.hash.removeprefix(HASH_PREFIX))


def _reason(found: Mapping[str, Any]) -> str:
    if found["type"] == "extra_forbidden":
        return "unknown field"
    if found["type"] == "value_error":  # Python's own words, which quote the value
        return "is not valid"
    return str(found["msg"]).replace("Input should", "should", 1)


def _mistake(name: str, root: yaml.Node, path: tuple[int | str, ...], reason: str) -> ConfigError:
    field = next((str(part) for part in reversed(path) if isinstance(part, str)), "")
    return _at(name, _node(root, path), f"{field}: {reason}" if field else reason)


def _at(name: str, node: yaml.Node, message: str) -> ConfigError:
    return ConfigError(f"{name}:{node.start_mark.line + 1}: {message}", param="api_keys_file")


def _node(root: yaml.Node, path: tuple[int | str, ...]) -> yaml.Node:
    """What stands at ``path``, or the innermost node that does."""
    node = root
    for step in path:
        inner: yaml.Node | None = None
        if isinstance(node, yaml.SequenceNode) and isinstance(step, int) and step < len(node.value):
            inner = node.value[step]
        elif isinstance(node, yaml.MappingNode):
            inner = next((value for key, value in node.value if key.value == step), None)
        if inner is None:
            return node
        node = inner
    return node


def _repeated(node: yaml.Node) -> Iterator[yaml.ScalarNode]:
    """Keys that stand twice in one mapping, which YAML libraries let pass."""
    if isinstance(node, yaml.MappingNode):
        seen: set[Any] = set()
        for key, value in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in seen:
                    yield key
                seen.add(key.value)
            yield from _repeated(value)
    elif isinstance(node, yaml.SequenceNode):
        for item in node.value:
            yield from _repeated(item)
