"""Configuration from Python: keys, types, bounds, contradictions."""

import pytest
from pydantic import ValidationError

from warmroot.cluster.config import WarmrootConfig
from warmroot.cluster.errors import ConfigError
from warmroot.cluster.sizes import format_size, parse_size
from warmroot.cluster.speculative_config import SpeculativeConfig


def test_defaults():
    config = WarmrootConfig.of("smollm2")
    assert config.model.names == ("smollm2",)
    assert config.cache.block_size == 16
    assert config.scheduler.max_num_batched_tokens == 2048
    assert config.routing.routing_policy == "warm_prefix"
    assert (config.server.host, config.server.port) == ("127.0.0.1", 8000)
    assert config.deploy.num_replicas == 1


def test_keys_reach_their_sections():
    config = WarmrootConfig.of(
        "/models/x", served_model_name=["a", "b"], kv_cache_memory="2GiB", num_replicas=3, routing_policy="random"
    )
    assert config.model.names == ("a", "b")
    assert config.cache.kv_cache_memory == 2 * 2**30
    assert (config.deploy.num_replicas, config.routing.routing_policy) == (3, "random")


def test_a_lone_name_is_a_list_of_one():
    assert WarmrootConfig.of("x", served_model_name="a").model.names == ("a",)


def test_keys_are_unique_and_documented():
    fields = [key for section in WarmrootConfig.SECTIONS.values() for key in section.model_fields]
    assert len(fields) == len(set(fields))
    assert [key for key, info in WarmrootConfig.keys().items() if not info.description] == []


def test_frozen():
    with pytest.raises(ValidationError):
        WarmrootConfig.of("x").server.port = 1


def test_secrets_are_not_shown():
    config = WarmrootConfig.of("x", api_key=["hunter2"])
    assert "hunter2" not in repr(config)
    assert config.server.api_key[0].get_secret_value() == "hunter2"
    with pytest.raises(ConfigError) as caught:
        WarmrootConfig.of("x", api_key=[b"hunter2"])
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"max_num_sequences": 4}, "max_num_sequences: unknown key; did you mean max_num_seqs?"),
        ({"zzz": 4}, "zzz: unknown key"),
        (
            {"kv_cache_dtype": "int3"},
            "kv_cache_dtype: 'int3' is not one of auto, fp32, fp16, bf16, fp8, int8, int4, k8v4; did you mean int8?",
        ),
        (
            {"kv_cache_dtype": "fp9"},
            "kv_cache_dtype: 'fp9' is not one of auto, fp32, fp16, bf16, fp8, int8, int4, k8v4; did you mean fp8?",
        ),
        (
            {"routing_policy": "warm-prefix"},
            "routing_policy: 'warm-prefix' is not one of warm_prefix, round_robin, random, power_of_two, least_loaded,"
            " session_affinity, sglang, ray, ray10, dynamo, dynamo10, dynamo_wspt, llmd_precise, llmd_base,"
            " llmd_active, aibrix, preble, gorgo, consistent_hash;"
            " did you mean warm_prefix?",
        ),
        ({"max_num_seqs": "many"}, "max_num_seqs: should be a valid integer, not 'many'"),
        ({"max_num_seqs": "4"}, "max_num_seqs: should be a valid integer, not '4'"),
        ({"max_num_seqs": True}, "max_num_seqs: should be a valid integer, not True"),
        ({"max_num_seqs": None}, "max_num_seqs: should be a valid integer, not None"),
        ({"port": 0}, "port: should be greater than or equal to 1, not 0"),
        ({"port": 65536}, "port: should be less than or equal to 65535, not 65536"),
        ({"enable_prefix_caching": "no"}, "enable_prefix_caching: should be a valid boolean, not 'no'"),
        ({"served_model_name": ["a", 1]}, "served_model_name: [1] should be a valid string, not 1"),
        ({"kv_cache_memory": "lots"}, "kv_cache_memory: 'lots' is not a size such as 2GiB, 512MB or 1000000"),
        ({"num_cpus": float("nan")}, "num_cpus: should be greater than 0, not nan"),
        (
            {"num_kv_blocks": 10, "kv_cache_memory": "1GiB"},
            "num_kv_blocks: give either num_kv_blocks or kv_cache_memory, not both",
        ),
        (
            {"max_num_batched_tokens": 8},
            "max_num_batched_tokens: 8 is less than max_num_seqs (256):"
            " a step must have room for one token of every sequence",
        ),
        ({"root_path": "api"}, "root_path: 'api' must start with / and must not end with it"),
        ({"api_key": ""}, "api_key: a key must not be empty"),
        ({"tenant_api_key": "sk-1"}, "tenant_api_key: must be of the form TENANT=KEY"),
        ({"tenant_api_key": "acme="}, "tenant_api_key: must be of the form TENANT=KEY"),
        ({"tenant_api_key": ["a=k", "b=k"]}, "tenant_api_key: a key must be of one tenant only"),
        ({"tenant_api_key": "a=k", "api_key": "k"}, "tenant_api_key: a key must be of one tenant only"),
        (
            {"ray_address": "auto", "num_cpus": 4},
            "num_cpus: applies to a Ray started here; leave it away with ray_address",
        ),
    ],
)
def test_what_is_wrong_is_said_in_one_line(keys, message):
    with pytest.raises(ConfigError) as caught:
        WarmrootConfig.of("x", **keys)
    assert caught.value.message == message
    assert caught.value.param == message.partition(":")[0]


NGRAM = {"method": "ngram", "num_speculative_tokens": 3}


@pytest.mark.parametrize(
    "given",
    [
        NGRAM,
        SpeculativeConfig(**NGRAM),
        '{"method": "ngram", "num_speculative_tokens": 3}',
        "{method: ngram, num_speculative_tokens: 3}",
    ],
)
def test_speculation_is_a_mapping_or_a_text_with_one(given):
    assert WarmrootConfig.of("x", speculative_config=given).speculation.speculative_config == SpeculativeConfig(**NGRAM)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"method": "ngrams"},
            "method: 'ngrams' is not one of ngram, draft_model, layer_skip, medusa; did you mean ngram?",
        ),
        ({"method": "ngram", "num_speculative_token": 3}, None),
        ({"num_speculative_tokens": 3}, "method: missing"),
        ({"method": "draft_model"}, "draft_model needs a model"),
        ("{method: ngram", None),
        ("ngram", None),
    ],
)
def test_speculation_that_makes_no_sense(given, message):
    with pytest.raises(ConfigError) as caught:
        WarmrootConfig.of("x", speculative_config=given)
    assert caught.value.param == "speculative_config"
    assert caught.value.message.startswith("speculative_config: ")
    assert message is None or caught.value.message == "speculative_config: " + message


def test_a_model_is_needed():
    with pytest.raises(ConfigError, match="model: missing"):
        WarmrootConfig.from_keys({})


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("2GiB", 2 * 2**30),
        ("2Gi", 2 * 2**30),
        ("2 gib", 2 * 2**30),
        ("2GB", 2 * 10**9),
        ("2G", 2 * 10**9),
        ("1.5MiB", 1572864),
        ("512k", 512_000),
        ("100B", 100),
        ("100", 100),
    ],
)
def test_sizes(text, size):
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "-1GiB", "1e9", "2XB", "2GiBs"])
def test_what_is_not_a_size(text):
    with pytest.raises(ValueError, match="is not a size"):
        parse_size(text)


def test_sizes_are_shown_with_three_digits():
    assert [format_size(size) for size in (0, 999, 1536, 1_342_177_280, 80e9, -2048)] == [
        "0 B",
        "999 B",
        "1.50 KiB",
        "1.25 GiB",
        "74.5 GiB",
        "-2.00 KiB",
    ]


def test_keys_of_tenants():
    config = WarmrootConfig.of("x", api_key=["k1"], tenant_api_key=["acme=k2==", "acme=k3", "b=k4"])
    assert config.server.all_keys == [("k1", ""), ("k2==", "acme"), ("k3", "acme"), ("k4", "b")]
    assert "k2" not in repr(config)
    with pytest.raises(ConfigError) as caught:
        WarmrootConfig.of("x", tenant_api_key=[b"acme=hunter2"])
    assert "hunter2" not in str(caught.value)
