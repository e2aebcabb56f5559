"""The image, built for real by buildah on a Debian of its own, and what runs in it.

Needs root, ``buildah`` and ``debootstrap``, and package indexes; minutes, and some gigabytes of disk.
WARMROOT_BUILD_VOLUMES names files of the host that the build needs, such as certificates and wheels, with colons
between: only the build sees them.
"""

import os
import resource
import shutil
import subprocess
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import pytest

from warmroot.deploy.checks.dockerfile import DOCKERFILE, TARGETS
from warmroot.deploy.checks.tools import ROOT
from warmroot.deploy.local_ray import free_port

MISSING = [name for name in ("buildah", "debootstrap") if shutil.which(name) is None]
BASE = "localhost/python-base:3.11"
PACKAGES = "python3,python3-venv,python3-pip,ca-certificates"
BUILD_VOLUMES = list(filter(None, os.environ.get("WARMROOT_BUILD_VOLUMES", "").split(":")))

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root"),
    pytest.mark.skipif(bool(MISSING), reason=f"needs {' and '.join(MISSING)}"),
]


VOLUMES = ("tmp", "home/warmroot", "var/cache/warmroot")
"""Where the chart mounts volumes: nothing else is written to, for the pods' root is read-only."""
OF_BUILDAH = ("dev", "proc", "run", "sys", "etc/hosts", "etc/resolv.conf", "etc/mtab")

MOST_FILES = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
LIMITS = ("--ulimit", f"nofile={MOST_FILES}:{MOST_FILES}")
"""Of open files: HAProxy wants ten thousand, and buildah's own is a thousand."""

SERVES = """
import subprocess, time, httpx
url = "http://127.0.0.1:{port}"
flags = ["--port", "{port}", "--threads-per-replica", "1", "--num-kv-blocks", "80", "--max-model-len", "512"]
server = subprocess.Popen(["warmroot", "serve", "smollm2", *flags])
while server.poll() is None:
    try:
        if httpx.get(url + "/health").status_code == 200:
            break
    except httpx.TransportError:
        time.sleep(0.5)
if server.poll() is not None:
    raise SystemExit("the server ended before it answered")
body = {{"model": "smollm2", "prompt": "The capital of France is", "max_tokens": 8, "temperature": 0}}
print(httpx.post(url + "/v1/completions", json=body, timeout=120).json()["choices"][0]["text"])
server.terminate()
print("ended with", server.wait(60))
"""


class Buildah:
    """With its images in a folder that goes with the test."""

    def __init__(self, folder: Path) -> None:
        self._options = ["--storage-driver", "vfs", "--root", str(folder / "root"), "--runroot", str(folder / "run")]

    def __call__(self, *words: str) -> str:
        done = subprocess.run(["buildah", *self._options, *words], capture_output=True, text=True, check=False)
        assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
        return done.stdout.strip()

    def build(self, target: str) -> str:
        """A container of a target of the Dockerfile."""
        volumes = [word for path in BUILD_VOLUMES for word in ("--volume", f"{path}:{path}:ro")]
        options = ["--isolation", "chroot", "--pull=never", "--build-arg", f"PYTHON_IMAGE={BASE}", "--target", target]
        self("bud", *options, *volumes, "--tag", f"warmroot:{target}", "--file", str(DOCKERFILE), str(ROOT))
        return self("from", *LIMITS, "--pull=never", f"warmroot:{target}")

    def run(self, container: str, *command: str) -> str:
        """In a container, as its user."""
        return self("run", "--isolation", "chroot", container, "--", *command)


@pytest.fixture(scope="module")
def buildah(tmp_path_factory) -> Iterator[Buildah]:
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
    yield buildah
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module", params=TARGETS)
def container(buildah: Buildah, request: pytest.FixtureRequest) -> str:
    """Of each target; torch is whatever the package index has, also for the one for GPUs."""
    return buildah.build(request.param)


@pytest.fixture(scope="module")
def cpu(buildah: Buildah) -> str:
    """Another container of the target that brings a model along."""
    return buildah("from", *LIMITS, "--pull=never", "warmroot:cpu")


def test_the_image_has_what_the_chart_counts_on(buildah: Buildah, container: str):
    assert buildah.run(container, "id", "-u") == "1000"
    assert buildah.run(container, "warmroot", "--version").startswith("warmroot ")
    assert buildah.run(container, "warmroot", "--help").startswith("usage: warmroot ")
    assert f"version {version('ray')}" in buildah.run(container, "ray", "--version")
    assert "HAProxy" in buildah.run(container, "warmroot-haproxy", "-v")
    assert buildah.run(container, "python", "-c", "import llguidance, opentelemetry.sdk") == ""
    # KubeRay starts Ray by bash, and asks with wget whether it is ready.
    assert buildah.run(container, "bash", "-c", "command -v wget")
    assert buildah.run(container, "sh", "-c", "command -v g++ gcc cc || echo none") == "none"


def test_the_user_writes_to_volumes_alone(buildah: Buildah, container: str):
    writable = (
        'find / -xdev \\( -type d -o -type f \\) -writable -not -path "/proc/*" -not -path "/sys/*" 2>/dev/null || true'
    )
    found = buildah.run(container, "sh", "-c", writable).splitlines()
    of_system = ("/dev", "/run", "/var/tmp", "/tmp")
    assert [path for path in found if not path.startswith(of_system) and not path[1:].startswith(VOLUMES)] == []
    assert {"/home/warmroot", "/var/cache/warmroot"} <= set(found)


def test_a_model_is_served_in_the_image_and_its_root_stays_as_it_is(buildah: Buildah, cpu: str, tmp_path: Path):
    mark = tmp_path / "mark"
    mark.touch()
    printed = buildah.run(cpu, "python", "-c", SERVES.format(port=free_port()))
    assert "Paris" in printed
    # 130 where it answers already and has not said so: it is interrupted while it starts.
    assert "ended with 0" in printed or "ended with 130" in printed
    root = Path(buildah("mount", cpu))
    written = [path for path in root.rglob("*") if os.lstat(path).st_ctime > mark.stat().st_mtime]
    places = [path.relative_to(root).as_posix() for path in written]
    assert [
        path for path in places if not path.startswith((*VOLUMES, *OF_BUILDAH)) and path not in ("etc", "var")
    ] == []
