"""Tools of ``make check-deploy``, and manifests that the chart makes."""

import copy

import pytest

from warmroot.deploy.checks.tools import EXAMPLES, Manifest, Tools, render

TOOLS = Tools()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        missing = [name for mark in item.iter_markers("tools") for name in mark.args if not TOOLS.has(name)]
        if missing:
            item.add_marker(pytest.mark.skip(reason=f"{', '.join(missing)} missing: run make check-deploy"))


@pytest.fixture(scope="session")
def tools() -> Tools:
    return TOOLS


@pytest.fixture(scope="session")
def rendered() -> list[Manifest]:
    return render(TOOLS, "helm4", EXAMPLES / "gpu-2x8.yaml")


@pytest.fixture
def manifests(rendered: list[Manifest]) -> list[Manifest]:
    """Those of the example with two nodes of eight GPUs, to be spoilt."""
    return copy.deepcopy(rendered)


@pytest.fixture
def service(manifests: list[Manifest]) -> Manifest:
    """The RayService among ``manifests``."""
    return next(manifest for manifest in manifests if manifest["kind"] == "RayService")
