"""Reads configuration from YAML and puts it together with flags and environment."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import SecretStr

from .config import WarmrootConfig
from .damaged import MISTAKES
from .errors import ConfigError
from .metadata_store import parse_store, with_password

KEY_VARIABLES = {"api_key": "WARMROOT_API_KEY", "admin_api_key": "WARMROOT_ADMIN_API_KEY"}


def flag_name(key: str) -> str:
    """What a key is called on the command line."""
    return "MODEL" if key == "model" else "--" + key.replace("_", "-")


def load_config(
    flags: Mapping[str, Any],
    *,
    config_file: str | None = None,
    environ: Mapping[str, str] | None = None,
    name: Callable[[str], str] = flag_name,
) -> WarmrootConfig:
    """One configuration: flags win over the environment (``KEY_VARIABLES``), that over the file. Raises ConfigError.

    WARMROOT_REDIS_PASSWORD completes a URL that has no password. ``name``: what messages call a key of ``flags``.
    """
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    if config_file is not None:
        values, origins = read_config_file(Path(config_file))
    for key, variable in KEY_VARIABLES.items():
        given = (environ or {}).get(variable)
        if given:
            values[key] = tuple(part.strip() for part in given.split(",") if part.strip())
            origins[key] = variable
    for key, value in flags.items():
        values[key] = value
        origins[key] = name(key)
    config = WarmrootConfig.from_keys(values, lambda key: origins.get(key, key))
    return _with_redis_password(config, environ or {})


def _with_redis_password(config: WarmrootConfig, environ: Mapping[str, str]) -> WarmrootConfig:
    """Replicas may be on nodes that know nothing of this process's environment."""
    store = config.deploy.metadata_store
    address = None if store is None else parse_store(store.get_secret_value())
    if address is None:
        return config
    url = SecretStr(with_password(address, environ).url)
    return config.model_copy(update={"deploy": config.deploy.model_copy(update={"metadata_store": url})})


def read_config_file(path: Path) -> tuple[dict[str, Any], dict[str, str]]:
    """(values, where each one stands as ``file:line: key``) of a YAML mapping. Keys may have ``-`` for ``_``."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise ConfigError(f"{path}: {reason}", param="config") from error
    try:
        return _read_mapping(text, str(path))
    except yaml.MarkedYAMLError as error:
        line = f":{error.problem_mark.line + 1}" if error.problem_mark else ""
        raise ConfigError(f"{path}{line}: not valid YAML: {error.problem or error.context}", param="config") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: not valid YAML: {str(error).splitlines()[0]}", param="config") from error
    except RecursionError as error:
        raise ConfigError(f"{path}: nested too deeply", param="config") from error


def _read_mapping(text: str, name: str) -> tuple[dict[str, Any], dict[str, str]]:
    loader: Any = yaml.SafeLoader(text)  # its construction methods are untyped
    try:
        root = loader.get_single_node()
        if root is None:
            return {}, {}
        if not isinstance(root, yaml.MappingNode):
            raise ConfigError(f"{name}:{root.start_mark.line + 1}: must be a mapping of keys", param="config")
        values: dict[str, Any] = {}
        origins: dict[str, str] = {}
        for key_node, value_node in root.value:
            written = str(key_node.value)
            key, where = written.replace("-", "_"), f"{name}:{key_node.start_mark.line + 1}: {written}"
            if key in values:
                raise ConfigError(f"{where}: stands here twice", param=key)
            try:
                values[key] = loader.construct_object(value_node, deep=True)
            except MISTAKES as error:  # dates and numbers that are none
                raise ConfigError(f"{where}: cannot be read: {error}", param=key) from error
            origins[key] = where
        return values, origins
    finally:
        loader.dispose()
