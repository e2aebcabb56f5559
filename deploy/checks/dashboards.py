"""Grafana dashboards: ids, titles and units are there, every expression parses, every metric of ours exists."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..grafana.files import generated
from .prometheus import check_expressions
from .tools import CHART, Tools

DASHBOARDS = CHART / "dashboards"
_MADE_BY = "run: python -m warmroot.deploy.grafana"
_DURATION = re.compile(r"\$__(rate_interval|interval|range)|\$\{?interval\}?")
_VARIABLE = re.compile(r"\$\{(\w+)(:\w+)?\}|\$(\w+)")
_WITH_UNIT = ("timeseries", "stat", "gauge", "bargauge")


def problems(tools: Tools, folder: Path = DASHBOARDS) -> list[str]:
    """Of all dashboards in ``folder``; there may be none."""
    found: list[str] = []
    uids: dict[str, str] = {}
    for path in sorted(folder.glob("*.json")):
        try:
            dashboard: Any = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            found.append(f"{path.name}: {error}")
            continue
        found += [f"{path.name}: {problem}" for problem in _problems(tools, dashboard)]
        other = uids.setdefault(dashboard.get("uid"), path.name)
        if other != path.name:
            found.append(f"{path.name}: has the uid of {other}")
    return found


def stale(root: Path = CHART) -> list[str]:
    """Dashboards and rules in the chart that are not those of ``deploy.grafana``."""
    made = {root / path.relative_to(CHART): content for path, content in generated().items()}
    old = [path for path in sorted((root / "dashboards").glob("*.json")) if path not in made]
    wrong = [path for path, content in made.items() if not path.exists() or path.read_text(encoding="utf-8") != content]
    return [f"{path.name}: is not what the code makes; {_MADE_BY}" for path in (*old, *wrong)]


def _problems(tools: Tools, dashboard: Any) -> Iterator[str]:
    yield from (f"has no {key}" for key in ("uid", "title") if not dashboard.get(key))
    panels = list(_panels(dashboard))
    ids = [panel.get("id") for panel in panels]
    yield from (f"two panels have the id {one}" for one in {one for one in ids if ids.count(one) > 1})
    expressions: list[tuple[str, str]] = []
    for panel in panels:
        title = panel.get("title") or f"panel {panel.get('id')}"
        if panel.get("type") in _WITH_UNIT and not panel.get("fieldConfig", {}).get("defaults", {}).get("unit"):
            yield f"{title}: has no unit"
        for target in panel.get("targets") or []:
            if not target.get("expr"):
                yield f"{title}: a target has no expression"
            else:
                expressions.append((title, _plain(target["expr"])))
    yield from check_expressions(tools, expressions)


def _panels(dashboard: Any) -> Iterator[Any]:
    for panel in dashboard.get("panels", []):
        yield panel
        yield from panel.get("panels") or []


def _plain(expression: str) -> str:
    """With values in place of Grafana's variables."""
    return _VARIABLE.sub("value", _DURATION.sub("5m", expression))
