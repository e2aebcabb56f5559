"""Custom resources against their definitions: unknown keys are errors, as they are lost silently in a cluster.

``schemas/`` holds a JSON Schema for each kind. This makes one of a CustomResourceDefinition:

    python -m warmroot.deploy.checks.custom_resources CRD.yaml deploy/checks/schemas

Rules in CEL, of which a cluster has some more, are not checked.
"""

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, cast

import yaml
from jsonschema import Draft202012Validator

from .tools import Manifest, name_of

SCHEMAS = Path(__file__).with_name("schemas")
OF_KUBERNETES = (
    "v1",
    "apps/v1",
    "batch/v1",
    "policy/v1",
    "networking.k8s.io/v1",
)
"""API versions of kinds that Kubernetes itself has."""


def problems(manifests: Iterable[Manifest]) -> list[str]:
    """What contradicts a definition, and kinds that have none here."""
    found: list[str] = []
    for manifest in manifests:
        if manifest.get("apiVersion") in OF_KUBERNETES:
            continue
        validator = _validators().get((str(manifest.get("apiVersion")), str(manifest.get("kind"))))
        if validator is None:
            found.append(f"{name_of(manifest)}: no definition of {manifest.get('apiVersion')} is known here")
            continue
        errors: Any = validator.iter_errors(manifest)
        found += [f"{name_of(manifest)}: {error.json_path}: {error.message[:200]}" for error in errors]
    return found


@cache
def _validators() -> dict[tuple[str, str], Draft202012Validator]:
    schemas = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(SCHEMAS.glob("*.json"))]
    return {(schema["apiVersion"], schema["kind"]): Draft202012Validator(schema["schema"]) for schema in schemas}


def main(argv: Sequence[str]) -> int:
    """Write the newest served version of a definition as a schema."""
    definition, folder = yaml.load(Path(argv[0]).read_text(encoding="utf-8"), Loader=yaml.CSafeLoader), Path(argv[1])
    spec, names = definition["spec"], definition["spec"]["names"]
    version = next(version for version in spec["versions"] if version["storage"])
    schema = strict(version["schema"]["openAPIV3Schema"])
    schema["properties"]["metadata"] = {"type": "object"}
    content = {"apiVersion": f"{spec['group']}/{version['name']}", "kind": names["kind"], "schema": schema}
    (folder / f"{names['singular']}.json").write_text(json.dumps(content, separators=(",", ":")) + "\n")
    return 0


def strict(schema: Any) -> Any:
    """A structural schema of Kubernetes as a JSON Schema that refuses unknown keys."""
    if not isinstance(schema, Mapping):
        return schema
    known = cast("Mapping[str, Any]", schema)
    result = {
        key: value
        for key, value in known.items()
        if not key.startswith("x-") and key not in ("description", "nullable")
    }
    if known.get("x-kubernetes-int-or-string"):
        result.pop("type", None)
        result["anyOf"] = [{"type": "integer"}, {"type": "string"}]
    if known.get("nullable") and isinstance(result.get("type"), str):
        result["type"] = [result["type"], "null"]
    properties = cast("Mapping[str, Any]", known.get("properties") or {})
    if properties:
        result["properties"] = {key: strict(value) for key, value in properties.items()}
        if not known.get("x-kubernetes-preserve-unknown-fields"):
            result.setdefault("additionalProperties", False)
    if "required" in result:  # what has a default is filled in
        result["required"] = [key for key in result["required"] if "default" not in properties.get(key, {})]
    for key in ("items", "additionalProperties"):
        if isinstance(result.get(key), Mapping):
            result[key] = strict(result[key])
    for key in ("allOf", "anyOf", "oneOf"):
        if key in known:
            result[key] = [strict(one) for one in known[key]]
    return result


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
