"""Alert rules: promtool parses and tests them, and every metric that they read is one that the API exports."""

import re
import tempfile
import time
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from prometheus_client.parser import text_string_to_metric_families

from ...router.metrics import RequestMetrics
from ...router.openai.settings import ApiSettings
from ...router.openai.tenancy import Tenancy
from ...router.several_models import SeveralModels
from .tools import CHART, Manifest, Tools

RULES = CHART / "files" / "rules.yaml"
TESTS = Path(__file__).with_name("rules_test.yaml")
METRIC = re.compile(r"\b(?:vllm|warmroot):[a-z0-9_]+")


def problems(tools: Tools, rules: Path = RULES, tests: Path = TESTS) -> list[str]:
    """Of the rules. ``tests`` are promtool's unit tests of them."""
    found = tools.problems("promtool", "check", "rules", rules)
    return found or [*_tested(tools, rules, tests), *_known(rules), *_described(rules)]


def problems_in(tools: Tools, manifests: Sequence[Manifest]) -> list[str]:
    """Of the rules of a release."""
    found: list[str] = []
    for manifest in manifests:
        if manifest.get("kind") == "PrometheusRule":
            with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
                yaml.safe_dump(manifest["spec"], file)
                file.flush()
                found += tools.problems("promtool", "check", "rules", file.name)
    return found


def check_expressions(tools: Tools, expressions: Iterable[tuple[str, str]]) -> list[str]:
    """What is wrong with PromQL expressions, each with a name for messages."""
    named = list(expressions)
    all_parse, _ = _parse(tools, [expression for _, expression in named])
    found: list[str] = []
    for name, expression in named:
        good, output = (True, "") if all_parse else _parse(tools, [expression])
        if not good:
            found.append(f"{name}: {output.splitlines()[-1].rpartition('could not parse expression:')[2].strip()}")
        found += [f"{name}: no metric is named {metric}" for metric in unknown_metrics(expression)]
    return found


def _parse(tools: Tools, expressions: Iterable[str]) -> tuple[bool, str]:
    """Whether promtool reads them all, and what it says."""
    rules = [{"record": f"rule_{place}", "expr": expression} for place, expression in enumerate(expressions)]
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        yaml.safe_dump({"groups": [{"name": "all", "rules": rules}]}, file)
        file.flush()
        return tools.run("promtool", "check", "rules", file.name)


def unknown_metrics(expression: str) -> list[str]:
    """Metrics of ours that an expression reads and the API does not export."""
    return sorted(set(METRIC.findall(expression)) - exported_metrics())


@cache
def exported_metrics() -> frozenset[str]:
    """Names of the samples of ``/metrics``, as far as they can be known before a request."""
    metrics = RequestMetrics(SeveralModels([]))
    metrics.registry.register(Tenancy.of(ApiSettings(), clock=time.time, monotonic=time.monotonic).collector())
    text = metrics.exposition().decode()
    names: set[str] = set()
    for family in text_string_to_metric_families(text):
        suffixes = {"counter": ("_total",), "histogram": ("_bucket", "_count", "_sum")}.get(family.type, ("",))
        names |= {family.name + suffix for suffix in suffixes}
    return frozenset(names)


def _tested(tools: Tools, rules: Path, tests: Path) -> list[str]:
    """The tests name the file of rules beside them: a copy stands there while they run."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "rules.yaml").write_bytes(rules.read_bytes())
        copy = Path(folder, "rules_test.yaml")
        copy.write_bytes(tests.read_bytes())
        found = tools.problems("promtool", "test", "rules", copy)
    cases: Any = yaml.safe_load(tests.read_text(encoding="utf-8"))["tests"]
    tested = {case["alertname"] for one in cases for case in one.get("alert_rule_test", [])}
    return found + [
        f"{rule['alert']}: has no test in {tests.name}" for rule in _alerts(rules) if rule["alert"] not in tested
    ]


def _known(rules: Path) -> list[str]:
    return [
        f"{rule['alert']}: no metric is named {name}"
        for rule in _alerts(rules)
        for name in unknown_metrics(rule["expr"])
    ]


def _described(rules: Path) -> list[str]:
    missing = [
        (rule["alert"], part)
        for rule in _alerts(rules)
        for part, holder in (("severity", "labels"), ("summary", "annotations"), ("description", "annotations"))
        if not rule.get(holder, {}).get(part)
    ]
    return [f"{alert}: has no {part}" for alert, part in missing]


def _alerts(rules: Path) -> list[Any]:
    groups: Any = yaml.safe_load(rules.read_text(encoding="utf-8"))["groups"]
    return [rule for group in groups for rule in group["rules"] if "alert" in rule]
