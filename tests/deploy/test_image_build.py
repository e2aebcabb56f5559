"""The image, built for real by buildah on a Debian of its own, and what runs in it.

Needs root, ``buildah`` and ``debootstrap``, and package indexes; minutes, and some gigabytes of disk.
WARMROOT_BUILD_VOLUMES names files of the host that the build needs, such as certificates, with colons between: only the
build sees them.
"""

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from warmroot.deploy.checks.dockerfile import DOCKERFILE
from warmroot.deploy.checks.tools import ROOT

MISSING = [name for name in ("buildah", "debootstrap") if shutil.which(name) is None]
BASE = "localhost/python-base:3.11"
PACKAGES = "python3,python3-venv,python3-pip,ca-certificates"
BUILD_VOLUMES = list(filter(None, os.environ.get("WARMROOT_BUILD_VOLUMES", "").split(":")))

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(2400),
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root"),
    pytest.mark.skipif(bool(MISSING), reason=f"needs {' and '.join(MISSING)}"),
]


class Buildah:
    """With its images in a folder that goes with the test."""

    def __init__(self, folder: Path) -> None:
        self._options = ["--storage-driver", "vfs", "--root", str(folder / "root"), "--runroot", str(folder / "run")]

    def __call__(self, *words: str) -> str:
        done = subprocess.run(["buildah", *self._options, *words], capture_output=True, text=True, check=False)
        assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
        return done.stdout.strip()

    def run(self, container: str, *command: str) -> str:
        """In a container, as its user."""
        return self("run", "--isolation", "chroot", container, "--", *command)


@pytest.fixture(scope="module")
def image(tmp_path_factory) -> Iterator[tuple[Buildah, str]]:
    folder = tmp_path_factory.mktemp("image")
    buildah, debian = Buildah(folder), folder / "debian"
    made = subprocess.run(
        ["debootstrap", "--variant=minbase", f"--include={PACKAGES}", "bookworm", str(debian)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert made.returncode == 0, made.stdout[-2000:]
    empty = buildah("from", "scratch")
    buildah("add", empty, str(debian), "/")
    buildah("commit", empty, BASE)
    volumes = [word for path in BUILD_VOLUMES for word in ("--volume", f"{path}:{path}:ro")]
    options = ["--isolation", "chroot", "--pull=never", "--build-arg", f"PYTHON_IMAGE={BASE}", "--target", "cpu"]
    buildah("bud", *options, *volumes, "--tag", "warmroot:cpu", "--file", str(DOCKERFILE), str(ROOT))
    yield buildah, buildah("from", "--pull=never", "warmroot:cpu")
    shutil.rmtree(folder, ignore_errors=True)


def test_the_image_has_what_the_chart_counts_on(image: tuple[Buildah, str]):
    buildah, container = image
    assert buildah.run(container, "id", "-u") == "1000"
    assert buildah.run(container, "warmroot", "--version").startswith("warmroot ")
    assert "version 2.60.0" in buildah.run(container, "ray", "--version")
    assert "HAProxy" in buildah.run(container, "warmroot-haproxy", "-v")
    assert buildah.run(container, "sh", "-c", "command -v g++ gcc cc || echo none") == "none"


def test_a_model_answers_in_the_image(image: tuple[Buildah, str]):
    buildah, container = image
    program = (
        "import warmroot\n"
        "with warmroot.LLM('smollm2', progress=False, num_threads=1, num_kv_blocks=64, max_model_len=256) as llm:\n"
        "    params = warmroot.SamplingParams(max_tokens=8, temperature=0)\n"
        "    print(llm.generate(['The capital of France is'], params)[0].text)\n"
    )
    assert "Paris" in buildah.run(container, "python", "-c", program)
