"""A Grafana dashboard from a list of rows of panels: ids, places and variables are worked out here."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

COLUMNS = 24
HEIGHT = 8
SOURCE = {"type": "prometheus", "uid": "${datasource}"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """``queries`` are (legend, PromQL); ``unit`` is Grafana's name of one; ``kind`` its name of a panel."""

    title: str
    description: str
    unit: str
    queries: tuple[tuple[str, str], ...]
    kind: str = "timeseries"
    width: int = 8


@dataclass(frozen=True, slots=True)
class Row:
    """Panels under a heading; the first row of a dashboard is open, the others too."""

    title: str
    panels: tuple[Panel, ...]


@dataclass(frozen=True, slots=True)
class Dashboard:
    """``uid`` is also the name of its file."""

    uid: str
    title: str
    description: str
    rows: tuple[Row, ...]

    def body(self) -> dict[str, Any]:
        """What Grafana imports."""
        return {
            "uid": self.uid,
            "title": self.title,
            "description": self.description,
            "tags": ["warmroot", "llm"],
            "schemaVersion": 39,
            "refresh": "30s",
            "time": {"from": "now-30m", "to": "now"},
            "timezone": "browser",
            "graphTooltip": 1,
            "templating": {"list": _variables()},
            "panels": _placed(self.rows),
        }


def _variables() -> list[dict[str, Any]]:
    model = {
        "name": "model",
        "label": "Model",
        "type": "query",
        "datasource": SOURCE,
        "query": {"query": "label_values(vllm:cache_config_info, model_name)", "refId": "model"},
        "refresh": 2,
        "includeAll": True,
        "multi": True,
        "allValue": ".*",
        "current": {"text": "All", "value": "$__all"},
    }
    return [{"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus"}, model]


def _placed(rows: Sequence[Row]) -> list[dict[str, Any]]:
    placed: list[dict[str, Any]] = []
    y = 0
    for row in rows:
        heading = {"type": "row", "title": row.title, "collapsed": False, "panels": []}
        placed.append({**heading, "id": len(placed) + 1, "gridPos": {"h": 1, "w": COLUMNS, "x": 0, "y": y}})
        x, y = 0, y + 1
        for panel in row.panels:
            if x + panel.width > COLUMNS:
                x, y = 0, y + HEIGHT
            position = {"h": HEIGHT, "w": panel.width, "x": x, "y": y}
            placed.append({**_body(panel), "id": len(placed) + 1, "gridPos": position})
            x += panel.width
        y += HEIGHT
    return placed


def _body(panel: Panel) -> dict[str, Any]:
    targets = [
        {"refId": chr(ord("A") + place), "datasource": SOURCE, "expr": expr, "legendFormat": legend}
        for place, (legend, expr) in enumerate(panel.queries)
    ]
    return {
        "type": panel.kind,
        "title": panel.title,
        "description": panel.description,
        "datasource": SOURCE,
        "fieldConfig": {"defaults": {"unit": panel.unit, "noValue": "none", "min": 0}, "overrides": []},
        "targets": targets,
    }
