"""URLs of the metadata store, and how they reach the configuration."""

import pytest

from warmroot.cluster.config import WarmrootConfig
from warmroot.cluster.config_file import load_config
from warmroot.cluster.errors import ConfigError
from warmroot.cluster.metadata_store import RedisAddress, parse_store, with_password

SECRET = "p@ss/w:rd"
QUOTED = "p%40ss%2Fw%3Ard"


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("redis://h", RedisAddress(hosts=(("h", 6379),))),
        ("redis://h:7000/3", RedisAddress(hosts=(("h", 7000),), db=3)),
        ("redis://h1,h2:7001?prefix=prod", RedisAddress(hosts=(("h1", 6379), ("h2", 7001)), prefix="prod")),
        ("redis://[::1]:7000", RedisAddress(hosts=(("::1", 7000),))),
        (f"rediss://u:{QUOTED}@h?ca=/etc/My-CA.pem", RedisAddress(
            hosts=(("h", 6379),), username="u", password=SECRET, tls=True, ca_file="/etc/My-CA.pem"
        )),
        (f"redis+sentinel://:{QUOTED}@s1,s2:5/mine?db=2&tls=1", RedisAddress(
            hosts=(("s1", 26379), ("s2", 5)), password=SECRET, service="mine", db=2, tls=True
        )),
    ],
)  # fmt: skip
def test_addresses(url, address):
    assert parse_store(url) == address
    assert parse_store(address.url) == address


def test_embedded_is_no_address():
    assert parse_store("embedded") is None


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("http://h", "must be embedded, redis://HOST"),
        ("redis://", "a host is missing"),
        ("redis://h:0", "a port must be a number"),
        ("redis://h/zero", "the database must be a number"),
        ("redis+sentinel://h", "the name of the primary is missing"),
        ("redis://h?prefx=x", "unknown option prefx"),
        ("redis://h?prefix={x}", "the prefix must be of letters"),
        ("redis://[::1", "is not a URL"),
        ("redis://:s3cret/x@h", "the database must be a number"),
        ("redis://:s3cret#x@h", "a host is missing"),
    ],
)
def test_mistakes_are_named_and_secrets_are_not(url, message):
    with pytest.raises(ValueError, match=message) as caught:
        parse_store(url)
    assert "s3cret" not in str(caught.value)
    with pytest.raises(ConfigError) as refused:
        WarmrootConfig.of("m", metadata_store=url)
    assert str(refused.value).startswith("metadata_store: ")
    assert "s3cret" not in str(refused.value)


def test_a_value_of_another_type_is_not_shown():
    with pytest.raises(ConfigError) as caught:
        WarmrootConfig.of("m", metadata_store=12345)
    assert "12345" not in str(caught.value)


def test_nothing_shows_the_password():
    address = parse_store(f"rediss://u:{QUOTED}@h")
    config = WarmrootConfig.of("m", metadata_store=address.url)
    for text in (repr(address), str(address), repr(config), str(config), config.model_dump_json()):
        assert SECRET not in text
        assert QUOTED not in text


def test_the_environment_gives_a_password_where_the_url_has_none():
    environ = {"WARMROOT_REDIS_PASSWORD": SECRET}
    assert with_password(parse_store("redis://u@h"), environ).password == SECRET
    assert with_password(parse_store("redis://:own@h"), environ).password == "own"
    assert with_password(parse_store("redis://h"), {}).password is None
    config = load_config({"model": "m", "metadata_store": "redis://u@h/1?prefix=x"}, environ=environ)
    address = parse_store(config.deploy.metadata_store.get_secret_value())
    assert address == RedisAddress(hosts=(("h", 6379),), db=1, username="u", password=SECRET, prefix="x")
    assert load_config({"model": "m"}, environ=environ).deploy.metadata_store is None
    embedded = load_config({"model": "m", "metadata_store": "embedded"}, environ=environ)
    assert embedded.deploy.metadata_store.get_secret_value() == "embedded"
