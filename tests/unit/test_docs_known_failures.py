"""docs/known_failures.md: every row is there, and every test that it names exists."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "known_failures.md").read_text()
SECTIONS = dict(re.findall(r"^## (\d+)\. .*?\n(.*?)(?=^## |\Z)", TEXT, re.MULTILINE | re.DOTALL))
NAMED = sorted(set(re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", TEXT)))


def names_of_tests(path: Path) -> set[str]:
    """Functions, and state machines as pytest sees them."""
    tree = ast.parse(path.read_text())
    functions = {node.name for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))}
    targets = (target for node in tree.body if isinstance(node, ast.Assign) for target in node.targets)
    names = functions | {target.id for target in targets if isinstance(target, ast.Name)}
    return {name for name in names if name.lower().startswith("test")}


def test_every_row_is_there_in_order():
    assert list(SECTIONS) == [str(number) for number in range(1, 26)]


@pytest.mark.parametrize("row", range(1, 26))
def test_each_names_reports_and_a_test_or_says_why_not(row):
    section = SECTIONS[str(row)]
    assert re.search(r"#\d+", section), "no report is named"
    assert re.search(r"`tests/[\w/]+\.py::test", section, re.IGNORECASE) or "**Not applicable" in section


def test_there_are_tests():
    assert len(NAMED) > 60


@pytest.mark.parametrize("path", sorted({path for path, _ in NAMED}))
def test_named_tests_exist(path):
    assert (ROOT / path).is_file()
    assert {name for where, name in NAMED if where == path} <= names_of_tests(ROOT / path)
