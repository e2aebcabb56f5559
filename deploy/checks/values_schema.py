"""The chart's schema knows every configuration key, so that ``helm`` refuses misspelt ones.

    python -m warmroot.deploy.checks.values_schema

writes today's keys into ``values.schema.json``, and the table of values into ``docs/kubernetes.md``.
"""

import json
import sys
from collections.abc import Iterator
from typing import Any

import yaml

from ...cluster.application_args import HTTP_OPTIONS, OF_LOCAL_RAY, OF_NODES
from ...cluster.config import SECRET_KEYS, WarmrootConfig
from .tools import CHART, ROOT

SCHEMA = CHART / "values.schema.json"
DOCUMENT = ROOT / "docs" / "kubernetes.md"
BEGIN, END = "<!-- values: begin -->\n", "<!-- values: end -->\n"
OF_THE_CHART = ("num_ingress", "metadata_store", "api_keys_file")
"""Keys that the chart sets, from ingress.replicas, metadataStore and auth.apiKeysFile."""
REMEDY = "run: python -m warmroot.deploy.checks.values_schema"


def main() -> int:
    """Rewrite both."""
    SCHEMA.write_text(updated_schema(SCHEMA.read_text(encoding="utf-8")), encoding="utf-8")
    DOCUMENT.write_text(updated_document(DOCUMENT.read_text(encoding="utf-8")), encoding="utf-8")
    return 0


def problems() -> list[str]:
    """Whether both are of today."""
    schema, document = SCHEMA.read_text(encoding="utf-8"), DOCUMENT.read_text(encoding="utf-8")
    found = [] if updated_schema(schema) == schema else [f"{SCHEMA.name} does not know today's keys; {REMEDY}"]
    return found + ([] if updated_document(document) == document else [f"{DOCUMENT.name} is of yesterday; {REMEDY}"])


def updated_schema(text: str) -> str:
    """``text`` with a property for each key that may stand in ``config``."""
    schema = json.loads(text)
    left_out = {*HTTP_OPTIONS, *OF_LOCAL_RAY, *OF_NODES, *SECRET_KEYS, *OF_THE_CHART}
    schema["$defs"]["config"]["properties"] = {
        key: {"description": " ".join((info.description or "").split())}
        for key, info in WarmrootConfig.keys().items()
        if key not in left_out
    }
    return json.dumps(schema, indent=2, ensure_ascii=False) + "\n"


def updated_document(text: str) -> str:
    """``text`` with the table of values between its marks. Raises ValueError when they are missing."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"{BEGIN.strip()} or {END.strip()} is missing")
    schema = json.loads(SCHEMA.read_text(encoding="utf-8"))
    defaults = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))
    rows = "\n".join(_rows(schema, schema, defaults, ""))
    return f"{before}{BEGIN}\n| value | default | meaning |\n|---|---|---|\n{rows}\n\n{END}{after}"


def _rows(root: Any, schema: Any, defaults: Any, path: str) -> Iterator[str]:
    for name, given in schema.get("properties", {}).items():
        value = root["$defs"][given["$ref"].rpartition("/")[2]] | given if "$ref" in given else given
        where = path + name
        default = defaults.get(name) if isinstance(defaults, dict) else None  # pyright: ignore[reportUnknownMemberType]
        nested = "config" not in given.get("$ref", "") and value.get("properties")
        shown = "" if nested or default in (None, "", [], {}) else f"`{json.dumps(default)}`"
        yield f"| `{where}` | {shown} | {value.get('description', '')} |"
        if nested:
            yield from _rows(root, value, default, f"{where}.")
        elif "properties" in value.get("items", {}):
            yield from _rows(root, value["items"], default[0] if default else None, f"{where}[].")


if __name__ == "__main__":
    sys.exit(main())
