"""``make check-deploy`` as a whole: what it prints, and how it ends."""

import pytest

from warmroot.deploy.checks import __main__ as command
from warmroot.deploy.checks.tools import EXAMPLES


def raises() -> list[str]:
    raise ValueError("helm4: no such chart")


@pytest.mark.parametrize(
    ("checks", "code", "lines"),
    [
        ([("one", list)], 0, ["ok   one", "all checks passed"]),
        ([("one", list), ("two", lambda: ["wrong"])], 1, ["FAIL two", "     wrong", "1 check(s) failed"]),
        ([("one", raises)], 1, ["FAIL one", "     helm4: no such chart"]),
    ],
)
def test_a_problem_fails_the_command(monkeypatch, capsys, checks, code, lines):
    monkeypatch.setattr(command, "checks", lambda tools: iter(checks))
    assert command.main([]) == code
    printed = capsys.readouterr().out
    for line in lines:
        assert line in printed


def test_a_missing_tool_is_a_problem_of_each_check_that_needs_it(tmp_path, capsys):
    assert command.main([str(tmp_path)]) == 1
    printed = capsys.readouterr().out
    for name in ("hadolint", "helm3", "helm4", "promtool", "shellcheck"):
        assert f"{name} is missing: see deploy/checks/get_tools.sh" in printed


def test_every_example_is_checked_with_both_helms():
    names = [name for name, _ in command.checks(command.Tools())]
    for example in EXAMPLES.glob("*.yaml"):
        for helm in ("helm3", "helm4"):
            assert {f"{helm} lint {example.stem}", f"{helm} template {example.stem}"} <= set(names)
