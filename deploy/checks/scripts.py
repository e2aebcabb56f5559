"""Shell scripts: shellcheck's rules."""

from collections.abc import Sequence
from pathlib import Path

from .tools import ROOT, Tools

SCRIPTS = (
    ROOT / ".ci" / "run",
    ROOT / "deploy" / "haproxy.sh",
    ROOT / "deploy" / "checks" / "get_tools.sh",
    ROOT / "tests" / "native" / "sanitize.sh",
)


def problems(tools: Tools, scripts: Sequence[Path] = SCRIPTS) -> list[str]:
    """Of the scripts."""
    return tools.problems("shellcheck", "--format=gcc", *scripts)
