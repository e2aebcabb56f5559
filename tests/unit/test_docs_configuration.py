"""docs/configuration.md says what the code says, and its YAML is a configuration."""

import re
from pathlib import Path

import pytest

from warmroot.cluster.config import WarmrootConfig
from warmroot.cluster.config_file import load_config
from warmroot.deploy.cli import configuration_table

DOCUMENT = Path(__file__).parents[2] / "docs" / "configuration.md"


@pytest.fixture
def text() -> str:
    return DOCUMENT.read_text(encoding="utf-8")


def test_tables_are_those_of_the_code(text):
    command = "python -m warmroot.deploy.cli.configuration_table docs/configuration.md"
    assert configuration_table.updated(text) == text, f"run: {command}"


def test_every_key_has_a_row():
    rows = re.findall(r"^\| `(\w+)` \| `--", configuration_table.render(), re.MULTILINE)
    assert rows == list(WarmrootConfig.keys())


@pytest.mark.parametrize(
    "row",
    [
        "| `port` | `--port` | integer ≥ 1, ≤ 65535 | `8000` | Port to listen on. |",
        "| `seed` | `--seed` | integer ≥ 0, < 2^63 |  | Base of the seeds of requests that bring none, for repeatable"
        " runs. Default: random. |",
        "| `max_body_bytes` | `--max-body-bytes` | size > 0 | 32.0 MiB | A larger request body gets 413. |",
        "| `allowed_origins` | `--allowed-origins` | list of texts | `*` | Web pages of these origins may call the API"
        " (CORS). |",
    ],
)
def test_rows(row):
    assert row in configuration_table.render().splitlines()


def test_rewriting_a_file(tmp_path):
    path = tmp_path / "configuration.md"
    path.write_text(f"before\n{configuration_table.BEGIN}of yesterday\n{configuration_table.END}after\n")
    assert configuration_table.main([str(path)]) == 0
    written = path.read_text(encoding="utf-8")
    assert written.startswith("before\n")
    assert written.endswith("after\n")
    assert "`--num-replicas`" in written
    assert "of yesterday" not in written


def test_a_file_without_marks_is_refused():
    with pytest.raises(ValueError, match="keys: begin"):
        configuration_table.updated("nothing")


def test_yaml_example_is_a_configuration(text, tmp_path):
    [example] = re.findall(r"^```yaml\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    path = tmp_path / "warmroot.yaml"
    path.write_text(example)
    config = load_config({}, config_file=str(path))
    assert config.model.names == ("smollm2", "default")
    assert config.cache.kv_cache_memory == 2 * 2**30
    assert (config.deploy.num_replicas, config.server.max_body_bytes) == (2, 8 * 2**20)
