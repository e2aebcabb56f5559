"""Grafana dashboards: ids, titles and units are there, every expression parses, every metric of ours exists."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .prometheus import check_expressions
from .tools import CHART, Tools

DASHBOARDS = CHART / "dashboards"
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
