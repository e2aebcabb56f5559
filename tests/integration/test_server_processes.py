"""What a server's processes listen on, and how they end, whatever ends first."""

import os
import shutil
import signal
import ssl
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import httpx
import pytest
from certificates_made import Authority

from .cluster_harness import wait_until
from .server_process import ServerProcess, listening


@pytest.fixture
def start(tmp_path: Path) -> Iterator[object]:
    servers: list[ServerProcess] = []

    def one(*flags: str, **options: object) -> ServerProcess:
        servers.append(ServerProcess(tmp_path, *flags, **options))  # type: ignore[arg-type]
        return servers[-1]

    yield one
    for server in servers:
        server.kill()


def public(server: ServerProcess) -> set[str]:
    pids = {server.process.pid, *(pid for pid, _ in server.look())}
    found = listening(pids)
    assert len(found) > 10, found
    return {place for place in found if not place.startswith("127.0.0.1:")}


def test_nothing_listens_beyond_loopback_and_sigterm_to_all_of_it_leaves_nothing(start):
    server = start().wait_ready()
    assert server.complete().status_code == 200
    assert public(server) == set()
    # Ray's daemons get it too, and some end at once.
    server.signal_group(signal.SIGTERM)
    assert server.ended(30) == 0


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl")
def test_tls_on_all_interfaces_and_kill_9(start, tmp_path: Path):
    authority = Authority.make(tmp_path)
    certificate, key = authority.sign("endpoint")
    flags = ("--ssl-certfile", str(certificate), "--ssl-keyfile", str(key), "--ssl-ca-certs", str(authority.file))
    node, node_key = authority.sign("node")
    flags += ("--channel-certfile", str(node), "--channel-keyfile", str(node_key))
    flags += ("--channel-ca-certs", str(authority.file))
    ours = ssl.create_default_context(cafile=str(authority.file))
    ours.load_cert_chain(*authority.sign("client"))
    server = start("--host", "0.0.0.0", *flags, scheme="https").wait_ready(ours)
    assert public(server) == {f"0.0.0.0:{server.port}"}
    with httpx.Client(base_url=server.url, verify=ours, trust_env=False) as client:
        assert client.get("/v1/models").status_code == 200
        for wrong in (ssl.create_default_context(), ssl.create_default_context(cafile=str(authority.file))):
            with pytest.raises(httpx.TransportError):
                httpx.get(f"{server.url}/v1/models", verify=wrong, trust_env=False)
        with pytest.raises(httpx.TransportError):
            httpx.get(f"{server.url.replace('https', 'http')}/v1/models", trust_env=False)
        before = served_certificate(server)
        authority.sign("endpoint")
        wait_until(lambda: served_certificate(server) != before, 20)
        assert client.get("/v1/models").status_code == 200
        body = {"model": "smollm2", "prompt": "One two three", "max_tokens": 3}
        assert client.post("/v1/completions", json=body, timeout=30).status_code == 200
    assert own(node.read_text()) in {own(shown) for shown in certificates(server.pids("ray::ServeReplica"))}
    server.process.kill()
    assert server.ended(5) == -9


def certificates(pids: list[int]) -> Iterator[str]:
    """Those that the processes show to whoever connects to any of their ports."""
    for address in listening(set(pids)):
        host, _, port = address.rpartition(":")
        with suppress(OSError):
            yield ssl.get_server_certificate((host, int(port)), timeout=2)


def own(text: str) -> bytes:
    """The first certificate of a file."""
    return ssl.PEM_cert_to_DER_cert(text[: text.index("-----END") + len("-----END CERTIFICATE-----")].strip())


def served_certificate(server: ServerProcess) -> str:
    return ssl.get_server_certificate(("127.0.0.1", server.port))


@pytest.mark.slow
def test_two_ctrl_c(start):
    server = start().wait_ready()
    server.signal_group(signal.SIGINT)
    server.signal_group(signal.SIGINT)
    assert server.ended(40) == 0


@pytest.mark.slow
@pytest.mark.parametrize("said", ["starting Ray", "starting Serve", "loading weights"])
def test_ctrl_c_while_it_starts(start, said: str):
    server = start()
    wait_until(lambda: said in server.log.read_text(), 120, server.log.read_text)
    server.signal_group(signal.SIGINT)
    assert server.ended(60) == 130


@pytest.mark.slow
@pytest.mark.parametrize("daemon", ["raylet/raylet", "gcs/gcs_server"])
def test_a_daemon_of_ray_dies(start, daemon: str):
    server = start("--max-model-len", "1024").wait_ready()
    tokens: list[str] = []
    reader = threading.Thread(target=read, args=(server, tokens))
    reader.start()
    wait_until(lambda: bool(tokens) or not reader.is_alive())
    [pid] = server.pids(daemon)
    kill(pid)
    if daemon.startswith("gcs"):
        # Whoever has a stream keeps it, and others are served too, until the raylet gives up.
        reader.join(30)
        assert tokens[-1] == "[DONE]"
        assert server.complete().status_code == 200
        server.process.send_signal(signal.SIGTERM)
        assert server.ended(40) == 0
    else:
        assert server.ended(40) == 1
        assert "Ray's raylet has ended" in server.log.read_text()
    reader.join(10)


@pytest.mark.slow
def test_an_ingress_and_the_controller_die(start):
    server = start("--num-ingress", "2").wait_ready()
    victim, _ = server.pids("ServeReplica:warmroot:Ingress")
    kill(victim)
    failed = [status for status in (attempt(server) for _ in range(40)) if status != 200]
    assert len(failed) <= 2, failed
    wait_until(lambda: len(server.pids("ServeReplica:warmroot:Ingress")) == 2, 60)
    [controller] = server.pids("ServeController")
    tokens: list[str] = []
    reader = threading.Thread(target=read, args=(server, tokens))
    reader.start()
    wait_until(lambda: bool(tokens))
    kill(controller)
    assert [attempt(server) for _ in range(10)] == [200] * 10
    reader.join(60)
    assert tokens[-1] == "[DONE]"
    wait_until(lambda: server.pids("ServeController") not in ([], [controller]), 60)
    server.process.send_signal(signal.SIGTERM)
    assert server.ended(60) == 0


def attempt(server: ServerProcess) -> int:
    try:
        return server.complete().status_code
    except httpx.TransportError:
        return 0


def read(server: ServerProcess, tokens: list[str]) -> None:
    body = {"model": "smollm2", "prompt": "Tell", "max_tokens": 300, "ignore_eos": True, "stream": True}
    with (
        suppress(httpx.TransportError),
        httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60, trust_env=False) as response,
    ):
        tokens.extend(line.removeprefix("data: ") for line in response.iter_lines() if line.startswith("data: "))


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
