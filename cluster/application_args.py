"""Arguments of the Serve application: flat configuration keys for one model, or a list of models with shared keys.

    {"model": "smollm2", "num_replicas": 2}
    {"models": [{"model": "smollm2"}, {"model": "org/other", "max_num_seqs": 64}], "allowed_origins": ["*"]}

Keys beside ``models`` hold for all of them; a model's own win, but for those of the ingress, which serves all models.
A model that stands there several times has so many groups of replicas, each cut and placed as its entry says.
The cluster stores arguments and shows them, so nothing secret may stand there.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

from pydantic import SecretStr

from .config import ModelConfig, WarmrootConfig
from .config_file import load_config
from .config_section import Section
from .errors import ConfigError
from .metadata_store import parse_store

MODELS = "models"
HTTP_OPTIONS = ("host", "port")
"""Keys that are the Serve config's ``http_options``."""
OF_LOCAL_RAY = ("ray_address", "num_cpus")
"""Keys that say where the cluster comes from; an application is in one already."""
OF_NODES = ("ssl_certfile", "ssl_keyfile", "ssl_ca_certs")
"""Keys of the endpoint itself, which the nodes' proxies read from variables."""
SHARED_SECTIONS = ("server", "requests", "tls", "limits")
SHARED_KEYS = ("metadata_store", "record_trace")
"""Beside those of the shared sections: one for all models of an application."""


def read_models(args: Mapping[str, Any], environ: Mapping[str, str]) -> tuple[WarmrootConfig, ...]:
    """One configuration for each model, the first one's names and server settings leading; secrets from ``environ``.

    Raises ConfigError.
    """
    if MODELS not in args:
        configs = (_read(args, environ, ""),)
    else:
        shared = {key: value for key, value in args.items() if key != MODELS}
        if "model" in shared:
            raise ConfigError("model: give either model or models, not both", param="model")
        configs = tuple(_of_several(shared, args[MODELS], environ))
    _check_names(configs)
    return configs


def application_args(config: WarmrootConfig) -> dict[str, Any]:
    """The keys that ``config`` was given, as plain values that ``read_models`` reads.

    Leaves ``HTTP_OPTIONS`` out. Raises ConfigError for what must not stand there.
    """
    given: dict[str, Any] = {}
    for section in _sections(config):
        keys = section.model_fields_set - set(HTTP_OPTIONS)
        for key in keys:
            _check_place(key, getattr(section, key), key)
        given |= section.model_dump(mode="json", include=set(keys))
    if "metadata_store" in given:
        given["metadata_store"] = cast(SecretStr, config.deploy.metadata_store).get_secret_value()
    return given


def _of_several(shared: Mapping[str, Any], models: Any, environ: Mapping[str, str]) -> Iterator[WarmrootConfig]:
    if not isinstance(models, Sequence) or isinstance(models, str) or not models:
        raise ConfigError(f"{MODELS}: must be a list of mappings of keys, one for each model", param=MODELS)
    for number, own in enumerate(cast("Sequence[Any]", models)):
        where = f"{MODELS}[{number}]"
        if not isinstance(own, Mapping):
            raise ConfigError(f"{where}: must be a mapping of keys", param=MODELS)
        own = cast("Mapping[str, Any]", own)
        for key in own:
            if key in _shared_keys():
                raise ConfigError(f"{where}.{key}: holds for all models: put it beside {MODELS}", param=key)
        yield _read({**shared, **own}, environ, f"{where}.")


def _read(values: Mapping[str, Any], environ: Mapping[str, str], where: str) -> WarmrootConfig:
    for key in HTTP_OPTIONS:
        if key in values:
            raise ConfigError(f"{where}{key}: is the cluster's: set it in http_options of the Serve config", param=key)
    public = load_config(values, name=lambda key: where + key)
    for section in _sections(public):
        for key in section.model_fields_set:
            _check_place(key, getattr(section, key), where + key)
    return load_config(values, environ=environ, name=lambda key: where + key)


def _sections(config: WarmrootConfig) -> list[Section]:
    return [getattr(config, name) for name in config.SECTIONS]


def _check_place(key: str, value: Any, where: str) -> None:
    """Raise ConfigError for a key whose value does not belong into arguments."""
    if key in OF_LOCAL_RAY:
        raise ConfigError(f"{where}: an application runs in the cluster that it is sent to; leave it away", param=key)
    if key in OF_NODES:
        raise ConfigError(f"{where}: give WARMROOT_{key.upper()} to the cluster's nodes instead", param=key)
    if key == "metadata_store":
        store = None if value is None else parse_store(value.get_secret_value())
        if store is not None and store.password is not None:
            raise ConfigError(
                f"{where}: the cluster would show its password; give WARMROOT_REDIS_PASSWORD to its nodes", param=key
            )
    elif any(isinstance(item, SecretStr) for item in (value if isinstance(value, tuple) else (value,))):  # pyright: ignore[reportUnknownVariableType]
        raise ConfigError(
            f"{where}: the cluster would show it to whoever may look; give it to its nodes by their environment or"
            " in a file",
            param=key,
        )


def _shared_keys() -> set[str]:
    sections = [WarmrootConfig.SECTIONS[name] for name in SHARED_SECTIONS]
    return {*SHARED_KEYS, *(key for section in sections for key in section.model_fields)}


def _check_names(configs: Sequence[WarmrootConfig]) -> None:
    """Entries that agree in all keys of the model itself are groups of its replicas; others may share no name."""
    seen: dict[str, ModelConfig] = {}
    for config in configs:
        for name in config.model.names:
            if seen.setdefault(name, config.model) != config.model:
                raise ConfigError(
                    f"served_model_name: {name!r} names two models; give them different ones", param="served_model_name"
                )
