"""The programs that checks run, in a folder that ``get_tools.sh`` fills, and the manifests that they make."""

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import yaml

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "deploy" / "helm" / "warmroot"
EXAMPLES = CHART / "examples"
RELEASE = "warmroot"

Manifest = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Tools:
    """Programs by name in ``folder``."""

    folder: Path = ROOT / ".tools"

    def has(self, name: str) -> bool:
        """Whether the program is there."""
        return (self.folder / name).exists()

    def run(self, name: str, *arguments: str | Path) -> tuple[bool, str]:
        """Whether it succeeded, and what it printed; on both streams where it failed."""
        if not self.has(name):
            return False, f"{name} is missing: see deploy/checks/get_tools.sh"
        command = [str(self.folder / name), *map(str, arguments)]
        environment = os.environ | {"PATH": f"{self.folder}{os.pathsep}{os.environ.get('PATH', '')}"}
        ended = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
        good = ended.returncode == 0
        return good, (ended.stdout if good else ended.stdout + ended.stderr).strip()

    def problems(self, name: str, *arguments: str | Path) -> list[str]:
        """What the program complains of; nothing where it succeeds."""
        good, output = self.run(name, *arguments)
        return [] if good else [f"{name}: {line}" for line in (output or "failed").splitlines() if line.strip()]


def lint(tools: Tools, helm: str, values: Path) -> list[str]:
    """``helm lint --strict`` with a file of values."""
    return tools.problems(helm, "lint", "--strict", "--quiet", CHART, "--values", values)


def template(tools: Tools, helm: str, values: Path, *flags: str) -> str:
    """The objects of a release, as YAML. Raises ValueError with what helm says."""
    good, output = tools.run(helm, "template", RELEASE, CHART, "--namespace", "default", "--values", values, *flags)
    if not good:
        raise ValueError(f"{helm}: {output}")
    return output


def render(tools: Tools, helm: str, values: Path) -> list[Manifest]:
    """The objects of a release. Raises ValueError with what helm says."""
    return read_manifests(template(tools, helm, values))


def read_manifests(text: str) -> list[Manifest]:
    """The objects of a YAML stream. Raises ValueError where it is none, or a key stands twice."""
    try:
        return [cast(Manifest, one) for one in yaml.load_all(text, Loader=_OnceLoader) if one]
    except yaml.YAMLError as error:
        raise ValueError(f"not valid YAML: {error}") from error


def name_of(manifest: Manifest) -> str:
    """``Kind/name``, for messages."""
    return f"{manifest.get('kind', '?')}/{manifest.get('metadata', {}).get('name', '?')}"


class _OnceLoader(yaml.CSafeLoader):
    """Refuses keys that stand twice, of which YAML's own loader takes the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """See SafeConstructor."""
        keys = [key.value for key, _ in node.value]
        twice = next((key for key in keys if keys.count(key) > 1 and key != "<<"), None)
        if twice is not None:
            raise yaml.constructor.ConstructorError(None, None, f"the key {twice!r} stands twice", node.start_mark)
        return super().construct_mapping(node, deep)
