"""The chart's files that are made here: a dashboard each, and the alert rules."""

import json
from pathlib import Path

import yaml

from .alerts import rules
from .dashboards import DASHBOARDS

CHART = Path(__file__).resolve().parents[1] / "helm" / "warmroot"
_HEAD = "# Made by python -m warmroot.deploy.grafana: change deploy/grafana/alerts.py.\n"


def generated() -> dict[Path, str]:
    """Content by path."""
    folder = CHART / "dashboards"
    found = {folder / f"{one.uid}.json": json.dumps(one.body(), indent=1) + "\n" for one in DASHBOARDS}
    found[CHART / "files" / "rules.yaml"] = _HEAD + yaml.safe_dump(rules(), sort_keys=False, width=1000)
    return found


def write() -> None:
    """Make them anew; what is made no more goes."""
    files = generated()
    (CHART / "dashboards").mkdir(exist_ok=True)
    for old in (CHART / "dashboards").glob("*.json"):
        if old not in files:
            old.unlink()
    for path, content in files.items():
        path.write_text(content, encoding="utf-8")
