"""Arguments of the Serve application: one model or several, what may stand where, and that secrets may not."""

import pytest

from warmroot.cluster.application_args import application_args, read_models
from warmroot.cluster.config import WarmrootConfig
from warmroot.cluster.config_file import load_config
from warmroot.cluster.errors import ConfigError

SEVERAL = {
    "models": [{"model": "a", "max_num_seqs": 4}, {"model": "b", "served_model_name": ["big", "b"]}],
    "max_num_seqs": 8,
    "num_ingress": 3,
}


def test_one_model_is_flat_keys():
    [config] = read_models({"model": "smollm2", "num_replicas": 2}, {})
    assert (config.model.names, config.deploy.num_replicas) == (("smollm2",), 2)


def test_several_models_share_keys_and_have_their_own():
    a, b = read_models(SEVERAL, {})
    assert (a.model.names, b.model.names) == (("a",), ("big", "b"))
    assert (a.scheduler.max_num_seqs, b.scheduler.max_num_seqs) == (4, 8)
    assert (a.server.num_ingress, b.server.num_ingress) == (3, 3)


def test_secrets_come_from_the_environment():
    environ = {"WARMROOT_API_KEY": "k1,k2", "WARMROOT_REDIS_PASSWORD": "p"}
    [config] = read_models({"model": "a", "metadata_store": "redis://store:6379"}, environ)
    assert [key for key, _ in config.server.all_keys] == ["k1", "k2"]
    assert config.deploy.metadata_store is not None
    assert ":p@store" in config.deploy.metadata_store.get_secret_value()


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({}, "model: missing"),
        ({"model": "a", "num_replica": 2}, "num_replica: unknown key; did you mean num_replicas?"),
        ({"model": "a", "num_replicas": 0}, "num_replicas: should be greater than or equal to 1, not 0"),
        ({"model": "a", "port": 9000}, "port: is the cluster's: set it in http_options of the Serve config"),
        ({"model": "a", "ssl_certfile": "/c.pem"}, "ssl_certfile: give WARMROOT_SSL_CERTFILE to the cluster's nodes"),
        ({"model": "a", "num_cpus": 2}, "num_cpus: an application runs in the cluster that it is sent to"),
        ({"model": "a", "api_key": "secret"}, "api_key: the cluster would show it"),
        ({"model": "a", "metadata_store": "redis://:secret@h"}, "metadata_store: the cluster would show its password"),
        ({"model": "a", "models": [{"model": "b"}]}, "model: give either model or models, not both"),
        ({"models": []}, "models: must be a list of mappings"),
        ({"models": ["a"]}, r"models\[0\]: must be a mapping of keys"),
        ({"models": [{"model": "a"}, {"model": "b", "max_num_seqs": 0}]}, r"models\[1\]\.max_num_seqs: should be"),
        ({"models": [{"model": "a", "num_ingress": 2}]}, r"models\[0\]\.num_ingress: holds for all models"),
        ({"models": [{"model": "a"}, {"model": "b", "served_model_name": "a"}]}, "'a' names two models"),
    ],
)
def test_errors_name_the_key_and_show_no_secret(args, message):
    with pytest.raises(ConfigError, match=message) as caught:
        read_models(args, {})
    assert "secret@" not in caught.value.message
    assert "'secret'" not in caught.value.message


def test_what_a_configuration_was_given_makes_it_again():
    keys = {
        "model": "a",
        "served_model_name": ["x", "y"],
        "kv_cache_memory": "2GiB",
        "speculative_config": '{"method": "ngram", "num_speculative_tokens": 4}',
        "metadata_store": "redis://store:6379",
        "node_labels": ["pool=blue"],
    }
    config = WarmrootConfig.from_keys(keys)
    args = application_args(config)
    assert args.keys() == keys.keys()
    assert args["kv_cache_memory"] == 2 * 2**30
    assert read_models(args, {}) == (load_config(keys),)


def test_the_address_of_the_endpoint_is_not_an_argument():
    assert application_args(WarmrootConfig.of("a", host="0.0.0.0", port=9000)) == {"model": "a"}


def test_a_key_in_the_configuration_is_not_made_an_argument():
    with pytest.raises(ConfigError, match="api_key"):
        application_args(WarmrootConfig.of("a", api_key="k"))
