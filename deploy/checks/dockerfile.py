"""The Dockerfile: hadolint's rules, and what the chart and the package count on."""

import re
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

from .tools import ROOT, Tools

DOCKERFILE = ROOT / "deploy" / "docker" / "Dockerfile"
TARGETS = ("cpu", "gpu")
_FROM = re.compile(r"^FROM (?:--platform=\S+ )?(\S+)(?: AS (\S+))?$", re.MULTILINE)


def problems(tools: Tools, dockerfile: Path = DOCKERFILE) -> list[str]:
    """Of the file."""
    text = dockerfile.read_text(encoding="utf-8")
    return [*tools.problems("hadolint", "--failure-threshold", "style", dockerfile), *_problems(text)]


def _problems(text: str) -> Iterator[str]:
    bodies = stages(text)
    arguments = dict(re.findall(r"^ARG (\w+)=(\S+)$", text, re.MULTILINE))
    if arguments.get("RAY_VERSION") != version("ray"):
        yield f"RAY_VERSION is {arguments.get('RAY_VERSION')}, and the package has ray {version('ray')}"
    for base, name in _FROM.findall(text):
        known = base in bodies or base.startswith("${")
        if not known and not re.search(r":[^:@]*\d", base):
            yield f"the base of {name} has no version: {base}"
    for target in TARGETS:
        if target not in bodies:
            yield f"there is no target {target}"
            continue
        body = lineage(text, target)
        users = re.findall(r"^USER (\S+)", body, re.MULTILINE)
        if not users or not re.fullmatch(r"[1-9]\d*(:\d+)?", users[-1]):
            yield f"target {target} must end as a user of a number other than 0, as runAsNonRoot wants"
        if re.search(r"\b(build-essential|g\+\+|gcc|clang)\b", body):
            yield f"target {target} has a compiler in it"


def stages(text: str) -> dict[str, tuple[str, str]]:
    """(base, instructions) of each named stage."""
    found: dict[str, tuple[str, str]] = {}
    marks = list(_FROM.finditer(text))
    for mark, following in zip(marks, [*marks[1:], None], strict=True):
        end = following.start() if following else len(text)
        if mark[2]:
            found[mark[2]] = (mark[1], text[mark.end() : end])
    return found


def lineage(text: str, name: str) -> str:
    """Instructions of a stage after those of the stages that it is based on."""
    base, body = stages(text)[name]
    return (lineage(text, base) if base in stages(text) else "") + body
