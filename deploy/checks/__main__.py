"""Runs all checks and says what is wrong: ``python -m warmroot.deploy.checks [FOLDER OF TOOLS]``."""

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from . import dashboards, dockerfile, plain, prometheus, scripts, values_schema
from .manifests import problems_of
from .tools import CHART, EXAMPLES, Tools, lint, render

HELMS = ("helm3", "helm4")


def main(argv: Sequence[str]) -> int:
    """0 if all is well."""
    tools = Tools(Path(argv[0])) if argv else Tools()
    failed = 0
    for name, check in checks(tools):
        began = time.perf_counter()
        try:
            problems = check()
        except ValueError as error:
            problems = [str(error)]
        failed += bool(problems)
        print(f"{'FAIL' if problems else 'ok':<5}{name} ({time.perf_counter() - began:.1f} s)", flush=True)
        for problem in problems:
            print(f"     {problem}", flush=True)
    print(f"{failed} check(s) failed" if failed else "all checks passed")
    return int(bool(failed))


def checks(tools: Tools) -> Iterator[tuple[str, Callable[[], list[str]]]]:
    """(name, check), the cheap ones first."""
    yield "dockerfile", lambda: dockerfile.problems(tools)
    yield "shell scripts", lambda: scripts.problems(tools)
    yield "values schema is that of the configuration", values_schema.problems
    for values in [CHART / "values.yaml", *sorted(EXAMPLES.glob("*.yaml"))]:
        for helm in HELMS:
            yield f"{helm} lint {values.stem}", lambda helm=helm, values=values: lint(tools, helm, values)
            made = f"{helm} template {values.stem}"
            yield made, lambda helm=helm, values=values: problems_of(tools, render(tools, helm, values))
    yield "plain manifests and kustomize overlays", lambda: plain.problems(tools)
    yield "alert rules", lambda: prometheus.problems(tools)
    yield "dashboards", lambda: dashboards.problems(tools)
    yield "dashboards and rules are those of the code", dashboards.stale


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
