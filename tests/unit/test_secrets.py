"""Keys and passwords appear in nothing that leaves the process: answers, logs, metrics, documents, representations."""

import itertools
import json
import logging

import pytest
from bus_contract import model_card
from openai_harness import Rig, says
from scripted_generator import Script

from warmroot.cluster.config import WarmrootConfig
from warmroot.cluster.config_file import load_config
from warmroot.cluster.errors import ConfigError, EngineError, OverloadedError
from warmroot.cluster.metadata_store import parse_store
from warmroot.router.openai.cluster_state import StoreStatus
from warmroot.router.tenancy.key_ring import hash_text

USER, TENANT, ADMIN, FILED, REDIS = (
    f"canary-{name}-0123456789" for name in ("user", "tenant", "admin", "filed", "redis")
)
WRONG = "canary-wrong-0123456789"
CANARIES = (USER, TENANT, ADMIN, FILED, REDIS, WRONG, "canary-")
STORE = f"redis://user:{REDIS}@localhost:6379/0"


def leaks(text: str) -> list[str]:
    return [canary for canary in CANARIES if canary in text]


PATHS = (
    "/health",
    "/metrics",
    "/openapi.json",
    "/docs",
    "/version",
    "/load",
    "/v1/models",
    "/v1/models/tiny",
    "/v1/models/no",
    "/admin/state",
    "/admin/routing/explain",
    "/nothing",
)
BODIES = (
    {"prompt": "Hi"},
    {"prompt": "Hi", "stream": True},
    {"prompt": 5},
    {"prompt": "Hi", "model": "no"},
    {"prompt": "Hi", "temperature": -1},
    {"messages": [{"role": "user", "content": "Hi"}]},
    {"messages": "x"},
)


@pytest.mark.parametrize(
    "script",
    [
        says("Hello!"),
        Script([], error=OverloadedError("full", retry_after=1.0)),
        Script([[65]], error=EngineError("broken")),
        lambda request: 1 / 0,
    ],
)
async def test_a_storm_of_good_and_bad_requests_tells_no_secret(tmp_path, caplog, script):
    keys = tmp_path / "keys.yaml"
    keys.write_text(json.dumps({"keys": [{"name": "filed", "hash": hash_text(FILED), "requests_per_minute": 5}]}))
    rig = Rig(
        script,
        api_keys=({"key": USER}, {"key": TENANT, "tenant": "t"}),
        admin_keys=(ADMIN,),
        api_keys_file=str(keys),
        audit_log=str(tmp_path / "audit.jsonl"),
    )
    rig.cluster.store = lambda: StoreStatus(store=str(parse_store(STORE)), fault="Redis is away")
    shown: list[str] = []
    with caplog.at_level(logging.DEBUG):
        async with rig.http() as client:
            for key, scheme in itertools.product((None, USER, TENANT, ADMIN, FILED, WRONG), ("Bearer", "Basic")):
                headers = {} if key is None else {"authorization": f"{scheme} {key}"}
                responses = [await client.get(path, headers=headers) for path in PATHS]
                for path, body in itertools.product(("/v1/completions", "/v1/chat/completions", "/tokenize"), BODIES):
                    responses.append(await client.post(path, json=body, headers=headers))
                responses.append(await client.post("/v1/completions", content=b"{", headers=headers))
                shown += [f"{response.headers} {response.text}" for response in responses]
        keys.write_text(f"keys: [{{name: x, hash: {FILED}}}]")
    statuses = {line for line in ("401", "403", "404") if any(line in text for text in shown)}
    assert statuses  # the storm met what it should
    assert leaks("".join(shown)) == []
    assert leaks(caplog.text) == []
    assert leaks((tmp_path / "audit.jsonl").read_text()) == []
    assert leaks(repr(rig.app.__dict__) + repr(rig.app.user_middleware)) == []


SECRETS = {
    "api_key": [USER],
    "tenant_api_key": [f"t={TENANT}"],
    "admin_api_key": [ADMIN],
    "metadata_store": STORE,
}


def test_a_configuration_shows_none():
    config = WarmrootConfig.of("x", **SECRETS)
    for shown in (repr(config), str(config), config.model_dump_json(), repr(config.server), str(config.deploy)):
        assert leaks(shown) == []
    assert config.server.admin_api_key[0].get_secret_value() == ADMIN


@pytest.mark.parametrize(
    "wrong",
    [
        {"api_key": [USER, USER.encode()]},
        {"api_key": {"a": USER}},
        {"tenant_api_key": [TENANT]},
        {"tenant_api_key": [f"a={TENANT}", f"b={TENANT}"]},
        {"admin_api_key": [ADMIN.encode()]},
        {"admin_api_key": [USER], "api_key": [USER]},
        {"metadata_store": f"http://user:{REDIS}@h"},
        {"metadata_store": f"redis://h:{REDIS}"},
        {"metadata_store": [REDIS]},
    ],
)
def test_what_is_wrong_with_a_secret_is_said_without_it(wrong):
    with pytest.raises(ConfigError) as caught:
        WarmrootConfig.of("x", **wrong)
    chain, error = "", caught.value
    while error is not None:
        chain += f"{error!r} {error}"
        error = None if error.__suppress_context__ else error.__context__
    assert leaks(chain) == []


def test_keys_from_the_environment():
    environ = {"WARMROOT_API_KEY": f"{USER}, other", "WARMROOT_ADMIN_API_KEY": ADMIN}
    server = load_config({"model": "x"}, environ=environ).server
    assert [key.get_secret_value() for key in server.api_key] == [USER, "other"]
    assert [key.get_secret_value() for key in server.admin_api_key] == [ADMIN]
    assert load_config({"model": "x", "admin_api_key": ["flag"]}, environ=environ).server.admin_api_key[0] != ADMIN
    with pytest.raises(ConfigError, match="WARMROOT_ADMIN_API_KEY: must be none"):
        load_config({"model": "x"}, environ={"WARMROOT_API_KEY": ADMIN, "WARMROOT_ADMIN_API_KEY": ADMIN})


def test_the_token_of_the_channels_is_not_shown():
    card = model_card("m")
    assert card.token
    assert card.token not in repr(card)


def test_the_password_of_redis_is_not_shown():
    address = parse_store(STORE)
    assert leaks(f"{address} {address!r}") == []
