"""What the wrapper makes of the configuration that Serve writes for HAProxy."""

import os
import subprocess
from pathlib import Path

import pytest
from ray.serve._private.haproxy_templates import HAPROXY_CONFIG_TEMPLATE

import warmroot.deploy

WRAPPER = Path(warmroot.deploy.__file__).with_name("haproxy.sh")
SERVES = """global
    stats socket /tmp/x/admin.sock mode 666 level admin expose-fd listeners
frontend prometheus
    bind :9101
    mode http
frontend http_frontend
    bind 127.0.0.1:8000
    default_backend default_backend
backend default_backend
    bind-process 1
listen stats
  bind *:8404
"""


@pytest.fixture
def rewrite(tmp_path: Path):
    binary, file = tmp_path / "haproxy", tmp_path / "haproxy.cfg"
    binary.write_text('#!/bin/sh\necho "$@"\n')
    binary.chmod(0o755)

    def run(config: str = SERVES, **variables: str) -> tuple[list[str], str]:
        file.write_text(config)
        run = subprocess.run(
            ["sh", str(WRAPPER), "-db", "-f", str(file), "-sf", "12"],
            env={"PATH": os.environ["PATH"], "WARMROOT_HAPROXY": str(binary), **variables},
            check=True,
            capture_output=True,
            text=True,
        )
        lines = [line.strip() for line in file.read_text().splitlines()]
        return lines, run.stdout.strip().replace(str(file), "FILE")

    return run


def binds(lines: list[str]) -> list[str]:
    return [line.removeprefix("bind ") for line in lines if line.startswith("bind ")]


def test_on_a_cluster_only_the_statistics_move(rewrite):
    lines, arguments = rewrite()
    assert binds(lines) == [":9101", "127.0.0.1:8000", "127.0.0.1:8404"]
    assert "stats socket /tmp/x/admin.sock mode 600 level admin expose-fd listeners" in lines
    assert arguments == "-dS -db -f FILE -sf 12"


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0", "[::]", "[::1]"])
def test_on_this_machine_only_the_endpoint_is_where_it_is_wanted(rewrite, host: str):
    lines, _ = rewrite(WARMROOT_HTTP_HOST=host)
    assert binds(lines) == ["127.0.0.1:9101", f"{host}:8000", "127.0.0.1:8404"]


def test_tls(rewrite, tmp_path: Path):
    files = {name: tmp_path / name for name in ("cert", "key", "ca")}
    for name, file in files.items():
        file.write_text(name)
    variables = {"WARMROOT_SSL_CERTFILE": str(files["cert"]), "WARMROOT_SSL_KEYFILE": str(files["key"])}
    quiet = {"WARMROOT_PYTHON": "/bin/true"}
    lines, _ = rewrite(**variables, **quiet)
    assert binds(lines)[1] == f"127.0.0.1:8000 ssl crt {tmp_path}/endpoint.pem"
    assert (tmp_path / "endpoint.pem").read_text() == "cert"
    assert (tmp_path / "endpoint.pem.key").read_text() == "key"
    lines, _ = rewrite(**variables, **quiet, WARMROOT_SSL_CA_CERTS=str(files["ca"]))
    assert binds(lines)[1].endswith(f" ca-file {tmp_path}/clients.pem verify required")
    assert (tmp_path / "clients.pem").read_text() == "ca"


def test_serve_still_writes_what_is_looked_for():
    template = HAPROXY_CONFIG_TEMPLATE
    order = ["mode 666", "frontend prometheus", "    bind :{{", "frontend http_frontend", "    bind {{", "backend "]
    order += ["listen stats", "  bind *:"]
    places = [template.index(text) for text in order[:6]] + [template.rindex(text) for text in order[6:]]
    assert places == sorted(places)
