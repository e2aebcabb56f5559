"""`warmroot serve` with keys in a file: two tenants, an admin, limits and an audit log."""

import json
import signal
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from warmroot.router.tenancy.key_edit import replace_text
from warmroot.router.tenancy.key_ring import hash_text

from .cluster_harness import wait_until
from .server_process import ServerProcess

pytestmark = [pytest.mark.cluster, pytest.mark.model]

KEYS = {name: f"sk-{name}-0123456789abcdefghij" for name in ("alice", "bob", "ops", "slow")}
FIELDS = {
    "alice": {"tenant": "acme"},
    "bob": {"tenant": "globex"},
    "ops": {"admin": True},
    "slow": {"tenant": "acme", "requests_per_minute": 1},
}
PROMPT = "The tenants of a house share its walls and nothing else. " * 6


def write_keys(path: Path, *names: str) -> None:
    keys = [{"name": name, "hash": hash_text(KEYS[name]), **FIELDS[name]} for name in names]
    replace_text(path, json.dumps({"keys": keys}))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    folder = tmp_path_factory.mktemp("tenancy")
    write_keys(folder / "keys.yaml", *KEYS)
    server = ServerProcess(folder, "--api-keys-file", "keys.yaml", "--audit-log", "audit.jsonl", cwd=folder)
    try:
        server.wait_ready()
        yield server.url, folder
        server.process.send_signal(signal.SIGTERM)
        assert server.ended(60) == 0
    finally:
        server.kill()


def ask(url: str, name: str, **headers: str) -> httpx.Response:
    body = {"prompt": PROMPT, "max_tokens": 4, "temperature": 0, "session_id": "same"}
    headers = {"authorization": f"Bearer {KEYS.get(name, name)}", **headers}
    return httpx.post(f"{url}/v1/completions", json=body, headers=headers, timeout=60, trust_env=False)


def get(url: str, path: str, name: str) -> httpx.Response:
    return httpx.get(f"{url}{path}", headers={"authorization": f"Bearer {KEYS[name]}"}, trust_env=False)


def cached(response: httpx.Response) -> int:
    assert response.status_code == 200, response.text
    return response.json()["usage"]["prompt_tokens_details"]["cached_tokens"]


def test_tenants_share_nothing_and_keys_do_what_the_file_says(server: tuple[str, Path]) -> None:
    url, folder = server
    first, again, other = (ask(url, name, **{"x-warmroot-explain": "1"}) for name in ("alice", "alice", "bob"))
    assert (cached(first), cached(again) > 32, cached(other)) == (0, True, 0)
    choices = [json.loads(response.headers["x-warmroot-routing"]) for response in (first, again, other)]
    assert [choice["predicted_tokens"] > 0 for choice in choices] == [False, True, False]
    assert first.json()["choices"][0]["text"] == other.json()["choices"][0]["text"]
    assert ask(url, "nobody").status_code == 401
    assert [get(url, "/admin/state", name).status_code for name in ("alice", "ops")] == [403, 200]
    limited = [ask(url, "slow"), ask(url, "slow")]
    assert [response.status_code for response in limited] == [200, 429]
    assert limited[0].headers["x-ratelimit-limit-requests"] == "1"
    assert 0 < int(limited[1].headers["retry-after"]) <= 60

    write_keys(folder / "keys.yaml", "alice", "ops")
    wait_until(lambda: ask(url, "bob").status_code == 401, 10)
    assert cached(ask(url, "alice")) > 32

    lines = [json.loads(line) for line in (folder / "audit.jsonl").read_text().splitlines()]
    told = [(line["key"], line["tenant"], line["status"], line["cached_tokens"] == 0) for line in lines[:3]]
    assert told == [("alice", "acme", 200, True), ("alice", "acme", 200, False), ("bob", "globex", 200, True)]
    text = (folder / "audit.jsonl").read_text() + (folder / "stderr").read_text()
    assert not [key for key in KEYS.values() if key in text]
    assert "tenants of a house" not in text
