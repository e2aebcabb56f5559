"""Configuration from YAML, environment and flags together."""

import pytest

from warmroot.cluster.config_file import load_config
from warmroot.cluster.errors import ConfigError


@pytest.fixture
def yaml_file(tmp_path):
    def write(text: str) -> str:
        path = tmp_path / "serve.yaml"
        path.write_text(text)
        return str(path)

    return write


def test_keys_with_dashes_or_underscores(yaml_file):
    path = yaml_file("model: smollm2\nmax-num-seqs: 4\nmax_model_len: 512\nserved-model-name: [a, b]\n")
    config = load_config({}, config_file=path)
    assert (config.scheduler.max_num_seqs, config.model.max_model_len) == (4, 512)
    assert config.model.names == ("a", "b")


def test_flags_win_over_environment_and_that_over_the_file(yaml_file):
    path = yaml_file("model: smollm2\nport: 1\napi-key: file\n")
    environ = {"WARMROOT_API_KEY": "env1, env2"}

    def keys(flags):
        return [key.get_secret_value() for key in load_config(flags, config_file=path, environ=environ).server.api_key]

    assert keys({}) == ["env1", "env2"]
    assert keys({"api_key": ["flag"]}) == ["flag"]
    assert load_config({"port": 2}, config_file=path).server.port == 2
    assert load_config({}, config_file=path).server.api_key[0].get_secret_value() == "file"


def test_an_empty_file_is_no_configuration(yaml_file):
    assert load_config({"model": "x"}, config_file=yaml_file("# nothing\n")).model.model == "x"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model: x\nmax_num_sequences: 4\n", ":2: max_num_sequences: unknown key; did you mean max_num_seqs?"),
        ("model: x\n\nmax-num-seqs: many\n", ":3: max-num-seqs: should be a valid integer, not 'many'"),
        ("model: x\nport: 1\nport: 2\n", ":3: port: stands here twice"),
        ("model: x\nmax-num-seqs: 1\nmax_num_seqs: 2\n", ":3: max_num_seqs: stands here twice"),
        ("- model\n", ":1: must be a mapping of keys"),
        ("model: [x\n", ":2: not valid YAML: expected ',' or ']', but got '<stream end>'"),
        ("model: !!python/name:os.system\n", ":1: not valid YAML: could not determine a constructor"),
    ],
)
def test_errors_name_file_and_line(yaml_file, text, message):
    path = yaml_file(text)
    with pytest.raises(ConfigError) as caught:
        load_config({}, config_file=path)
    assert caught.value.message.startswith(path + message)


def test_errors_name_flag_and_variable():
    with pytest.raises(ConfigError, match=r"^--max-num-seqs: should be"):
        load_config({"model": "x", "max_num_seqs": 0})
    with pytest.raises(ConfigError, match=r"^MODEL: "):
        load_config({"model": ""})


def test_a_missing_file(tmp_path):
    with pytest.raises(ConfigError, match=r"none\.yaml: No such file"):
        load_config({}, config_file=str(tmp_path / "none.yaml"))
