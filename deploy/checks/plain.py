"""Manifests for those who do without Helm: made from the chart, and kept in step with it.

    python -m warmroot.deploy.checks.plain

writes ``deploy/kustomize/base``, which the overlays beside it change.
"""

import sys
from pathlib import Path

from .manifests import problems_of
from .tools import EXAMPLES, ROOT, Manifest, Tools, read_manifests, template

KUSTOMIZE = ROOT / "deploy" / "kustomize"
PLAIN = KUSTOMIZE / "base" / "rayservice.yaml"
VALUES = EXAMPLES / "cpu.yaml"
HEAD = "# Made from the chart with examples/cpu.yaml by: python -m warmroot.deploy.checks.plain\n"


def main() -> int:
    """Write the base anew."""
    PLAIN.parent.mkdir(parents=True, exist_ok=True)
    PLAIN.write_text(text(Tools()), encoding="utf-8")
    return 0


def text(tools: Tools) -> str:
    """What the chart makes, without what only Helm reads. Raises ValueError."""
    lines = [line.rstrip() for line in template(tools, "helm4", VALUES, "--skip-tests").splitlines()]
    kept = [line for line in lines if "helm.sh/" not in line and "managed-by: Helm" not in line and line]
    return HEAD + "\n".join(kept) + "\n"


def overlays() -> list[Path]:
    """Folders of overlays."""
    return sorted(path.parent for path in KUSTOMIZE.glob("overlays/*/kustomization.yaml"))


def build(tools: Tools, folder: Path) -> list[Manifest]:
    """What kustomize makes of a folder. Raises ValueError."""
    good, output = tools.run("kubectl", "kustomize", folder)
    if not good:
        raise ValueError(output)
    return read_manifests(output)


def problems(tools: Tools) -> list[str]:
    """Whether the base is what the chart makes, and what is wrong with the overlays."""
    found: list[str] = []
    if not PLAIN.exists() or PLAIN.read_text(encoding="utf-8") != text(tools):
        found.append(f"{PLAIN.name} is not what the chart makes; run: python -m warmroot.deploy.checks.plain")
    for folder in [PLAIN.parent, *overlays()]:
        found += [f"{folder.name}: {problem}" for problem in overlay_problems(tools, folder)]
    return found


def overlay_problems(tools: Tools, folder: Path) -> list[str]:
    """What is wrong with what a folder makes."""
    try:
        return problems_of(tools, build(tools, folder))
    except ValueError as error:
        return [str(error)]


if __name__ == "__main__":
    sys.exit(main())
