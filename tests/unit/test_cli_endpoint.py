"""chat, complete and status against a small endpoint on loopback."""

import io
import json
import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from warmroot.deploy.cli import main

USAGE = {"prompt_tokens": 20, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 16}}
REPLICA = {"replica": "r0", "model": "tiny", "state": "ready", "running": 1, "waiting": 2, "kv_cache_usage": 0.25}
REPLICA |= {"kernels": "avx2", "weights_format": "q4_1", "kv_format": "fp16", "num_threads": 2, "ranks": []}
RANK = {"rank": 1, "stage": 0, "host": "node-a", "pid": 4711, "memory_bytes": 3 * 2**20, "last_step": 1234}


class Handler(BaseHTTPRequestHandler):
    """Answers as the API does; remembers bodies on its server."""

    def log_message(self, *_):
        pass

    def do_GET(self):
        answers = {
            "/v1/models": {"data": [{"id": "tiny"}]},
            "/admin/state": {
                "version": "9.9",
                "ready": self.server.ready,
                "models": ["tiny"],
                "server_load": 3,
                "metadata_store": {"store": "redis://h:6379/0", "fault": self.server.fault},
                "replicas": [REPLICA | {"ranks": self.server.ranks}],
            },
        }
        return self.answer(200, answers[self.path])

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.bodies.append(body)
        if self.headers.get("Authorization") != "Bearer sesame":
            return self.answer(401, {"error": {"message": "wrong key"}})
        if body.get("max_tokens") == 0:
            return self.answer(400, {"error": {"message": "max_tokens must be positive"}})
        if body.get("max_tokens") == 502:
            return self.answer(502, "<html>")
        key = "delta" if "messages" in body else "text"
        parts = [{"content": word} for word in ("Hel", "lo")] if key == "delta" else ["Hel", "lo"]
        events = [{"choices": [{key: part}]} for part in parts] + [{"choices": [], "usage": USAGE}]
        if body.get("max_tokens") == 500:
            events = [events[0], {"error": {"message": "the replica died"}}]
        lines = [f"data: {json.dumps(event)}\n\n" for event in events] + [": keep-alive\n\n"]
        lines += ["data: [DONE]\n\n"] if body.get("max_tokens") != 1 else []
        return self.answer(200, "".join(lines))

    def answer(self, status, content):
        text = content if isinstance(content, str) else json.dumps(content)
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())


@pytest.fixture
def server():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.bodies, server.ready, server.ranks, server.fault = [], True, [], ""
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def flags(server, monkeypatch):
    monkeypatch.delenv("WARMROOT_DEBUG", raising=False)
    return ["--url", f"http://127.0.0.1:{server.server_port}", "--api-key", "sesame"]


def test_complete_streams_to_standard_output(server, flags, capsys):
    assert main(["complete", *flags, "Say hello", "--max-tokens", "5", "--temperature", "0", "--stop", "x"]) == 0
    assert capsys.readouterr().out == "Hello\n"
    [body] = server.bodies
    assert body == {
        "model": "tiny",
        "prompt": "Say hello",
        "max_tokens": 5,
        "temperature": 0.0,
        "stop": ["x"],
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def test_complete_reads_standard_input(server, flags, monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", io.StringIO("from a pipe"))
    assert main(["complete", *flags]) == 0
    assert server.bodies[0]["prompt"] == "from a pipe"


def test_one_message(server, flags, capsys):
    assert main(["chat", *flags, "--message", "hi", "--system", "be brief", "--model", "other"]) == 0
    assert capsys.readouterr().out == "Hello\n"
    assert server.bodies[0]["model"] == "other"
    assert server.bodies[0]["messages"] == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "hi"},
    ]


def test_a_conversation_keeps_its_history_until_cleared(server, flags, monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", io.StringIO("one\n\ntwo\n/clear\nthree\n/exit\nfour\n"))
    assert main(["chat", *flags]) == 0
    contents = [[message["content"] for message in body["messages"]] for body in server.bodies]
    assert contents == [["one"], ["one", "Hello", "two"], ["three"]]


def test_status(server, flags, capsys):
    assert main(["status", *flags]) == 0
    out = capsys.readouterr().out
    assert "ready, serves tiny (version 9.9)" in out
    assert "25.0%" in out
    assert "avx2 kernels, q4_1 weights, fp16 KV, 2 threads a replica" in out
    server.ready = False
    assert main(["status", *flags, "--json"]) == 1
    state = json.loads(capsys.readouterr().out)
    assert (state["ready"], state["server_load"], state["replicas"]) == (False, 3, [REPLICA])


def test_status_tells_of_the_metadata_store(server, flags, capsys):
    assert main(["status", *flags]) == 0
    assert "metadata store redis://h:6379/0: in touch\n" in capsys.readouterr().out
    server.fault = "Redis is away"
    assert main(["status", *flags]) == 0
    assert "metadata store redis://h:6379/0: routing on what is known: Redis is away\n" in capsys.readouterr().out


def test_status_shows_ranks(server, flags, capsys):
    server.ranks = [RANK]
    assert main(["status", *flags]) == 0
    out = capsys.readouterr().out
    assert all(text in out for text in ("node-a", "4711", "3.00 MiB", "1,234"))


@pytest.mark.parametrize(
    ("extra", "code", "message"),
    [
        (["--max-tokens", "0"], 2, "max_tokens must be positive"),
        (["--max-tokens", "500"], 1, "the replica died"),
        (["--api-key", "guess"], 2, "wrong key (give one with --api-key)"),
    ],
)
def test_failures_are_told_in_one_line(flags, extra, code, message, capsys):
    assert main(["complete", *flags, "x", *extra]) == code
    assert capsys.readouterr().err == f"warmroot complete: {message}\n"


def test_a_stream_without_its_end(flags, capsys):
    assert main(["complete", *flags, "x", "--max-tokens", "1"]) == 1
    assert "closed the stream before its end" in capsys.readouterr().err


def test_nothing_listens(capsys):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
        assert main(["status", "--url", url + "/v1/"]) == 1
    error = capsys.readouterr().err
    assert error.startswith(f"warmroot status: nothing answers at {url}; start an endpoint with `warmroot serve")
    assert error.count("\n") == 1


@pytest.mark.parametrize("url", ["localhost:8000", "ftp://host", "http://", "http://host:port", ""])
def test_what_is_not_a_url(url, capsys):
    assert main(["status", "--url", url]) == 2
    assert f"{url!r} is not a URL such as http://127.0.0.1:8000" in capsys.readouterr().err


def test_something_else_answers(server, flags, monkeypatch, capsys):
    monkeypatch.setattr(Handler, "do_GET", lambda self: self.answer(200, "<html>"))
    assert main(["status", *flags]) == 1
    assert capsys.readouterr().err.endswith("/admin/state does not answer as a Warmroot endpoint does\n")


def test_a_gateway_without_an_endpoint(server, flags, capsys):
    assert main(["complete", *flags, "x", "--max-tokens", "502"]) == 1
    assert capsys.readouterr().err.endswith("/v1/completions answers 502 Bad Gateway\n")
