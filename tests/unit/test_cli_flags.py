"""Flags: made from the configuration's fields, merged with a file, explained when wrong."""

import pytest

from warmroot.cluster.config import WarmrootConfig
from warmroot.cluster.errors import ConfigError
from warmroot.deploy.cli.flags import ALIASES, Parser, add_config_flags


def read(*argv: str) -> dict:
    parser = Parser("warmroot serve", "")
    add_config_flags(parser)
    return vars(parser.read(argv))


def test_only_what_is_given_comes_back():
    assert read("smollm2") == {"model": "smollm2", "config": None}
    assert read() == {"config": None}


def test_every_key_is_a_flag():
    parser = Parser("x", "")
    add_config_flags(parser)
    known = parser.format_help()
    assert [key for key in list(WarmrootConfig.keys()) if "--" + key.replace("_", "-") not in known] == []


def test_values_have_the_fields_types():
    flags = read(
        *("--max-model-len", "512", "--gpu-memory-utilization", "0.5", "--kv-cache-memory", "2GiB", "m"),
        *("--dtype=float16", "--served-model-name", "a", "b", "--api-key", "k1", "--api-key", "k2"),
    )
    config = WarmrootConfig.from_keys({key: value for key, value in flags.items() if key != "config"})
    assert (config.model.max_model_len, config.cache.gpu_memory_utilization) == (512, 0.5)
    assert (config.cache.kv_cache_memory, config.model.dtype) == (2**31, "float16")
    assert config.model.names == ("a", "b")
    assert [key.get_secret_value() for key in config.server.api_key] == ["k1", "k2"]


@pytest.mark.parametrize(
    "argv",
    [
        ("smollm2", "--port", "1"),
        ("--port", "1", "smollm2"),
        ("--port", "1", "--model", "smollm2"),
        ("--port=1", "--model_path", "smollm2"),
    ],
)
def test_the_model_may_stand_anywhere(argv):
    assert read(*argv) == {"model": "smollm2", "port": 1, "config": None}


def test_underscores_pass_in_names_but_not_in_values():
    assert read("--served_model_name=a_b", "--max_num_seqs", "3") == {
        "served_model_name": ["a_b"],
        "max_num_seqs": 3,
        "config": None,
    }


@pytest.mark.parametrize(
    ("flag", "key"),
    [
        ("--context-length", "max_model_len"),
        ("--max-running-requests", "max_num_seqs"),
        ("--chunked-prefill-size", "max_num_batched_tokens"),
        ("--page-size", "block_size"),
    ],
)
def test_other_engines_names(flag, key):
    assert read(flag, "32")[key] == 32


def test_aliases_stand_for_keys():
    assert set(ALIASES) <= set(WarmrootConfig.keys())


def test_prefix_caching_can_be_switched_off_in_two_ways():
    assert read("--disable-radix-cache")["enable_prefix_caching"] is False
    assert read("--no-enable-prefix-caching")["enable_prefix_caching"] is False
    assert read("--enable-prefix-caching")["enable_prefix_caching"] is True


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("--max-num-sequences", "4"), "--max-num-sequences: unknown flag; did you mean --max-num-seqs?"),
        (("--max-num-sequences=4",), "--max-num-sequences: unknown flag; did you mean --max-num-seqs?"),
        (("a", "b"), "b: unknown argument"),
        (("--max-model", "4"), "--max-model: unknown flag"),
        (("--port", "x"), "argument --port: invalid int value: 'x'"),
        (("--port",), "argument --port: expected one argument"),
        (("--kv-cache-dtype", "int3"), "argument --kv-cache-dtype: invalid choice: 'int3'"),
    ],
)
def test_errors(argv, message):
    with pytest.raises(ConfigError) as caught:
        read(*argv)
    assert caught.value.message.startswith(message)
    assert caught.value.message.endswith("(see warmroot serve --help)")
