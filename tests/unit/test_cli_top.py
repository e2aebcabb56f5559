"""``warmroot top`` against the real API over engines with real caches."""

import asyncio
import io
import json
from contextlib import contextmanager

import pytest
from engine_deployment import ADMIN, Deployment
from openai_harness import listening
from rich.console import Console

from warmroot.deploy.cli import main
from warmroot.deploy.cli.top import screen
from warmroot.router.weights_updater import WeightsUpdater

EVIL = "[bold red]not markup[/]\x1b[31m and a very long question that goes on and on for ever"


@pytest.fixture
async def endpoint():
    deployment = Deployment()
    await deployment.follow()
    deployment.updaters["m"] = WeightsUpdater(list)
    deployment.updaters["m"].stage = "2 replicas load [red]new[/]"
    for prompt in ("the very same words", EVIL):
        await deployment.ask("sk", prompt=prompt)
    await deployment.ask("sk-a", prompt="a tenant's words")
    async with listening(deployment.app) as url:
        yield url


async def run(*argv):
    return await asyncio.to_thread(main, ["top", *argv])


async def test_once(endpoint, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    assert await run("--url", endpoint, "--api-key", ADMIN, "--once") == 0
    out = capsys.readouterr().out
    for word in (
        "ready",
        "TTFT p95",
        "r0",
        "r1",
        "the very same",
        "Decisions",
        "cold",
        "embedded",
        "in touch",
        "shared",
        "Weights of m: 2 replicas load [red]new[/]",
    ):
        assert word in out, word
    assert "[bold red]not markup[/]" in out  # text of prompts is text
    assert "\x1b[31m" not in out
    assert "a tenant's words" not in out


async def test_json_is_the_state(endpoint, capsys):
    assert await run("--url", endpoint, "--api-key", ADMIN, "--json", "--decisions", "1", "--prefixes", "0") == 0
    state = json.loads(capsys.readouterr().out)
    assert (len(state["decisions"]), state["prefixes"]) == (1, [])


async def test_a_wrong_key(endpoint, capsys):
    assert await run("--url", endpoint, "--api-key", "sk-a", "--once") == 2
    assert "needs an admin's key" in capsys.readouterr().err


async def test_it_watches_until_interrupted(endpoint, monkeypatch):
    drawn = []

    @contextmanager
    def live(first, **options):
        yield type("Live", (), {"update": staticmethod(lambda shown, **_: drawn.append(shown))})

    naps = iter([None, None])

    def nap(seconds):
        if next(naps, "over") == "over":
            raise KeyboardInterrupt

    monkeypatch.setattr("warmroot.deploy.cli.top.Live", live)
    monkeypatch.setattr("warmroot.deploy.cli.top.time.sleep", nap)
    assert await run("--url", endpoint, "--api-key", ADMIN) == 0
    assert len(drawn) == 3


def test_steps_of_the_autoscaler_and_a_store_that_is_away():
    totals = dict.fromkeys(
        ("requests_per_s", "failed_per_s", "output_tokens_per_s", "running", "waiting"), 0
    ) | dict.fromkeys(("ttft_p50_s", "ttft_p95_s", "itl_p50_s", "itl_p95_s", "hit_rate"))
    state = {
        "ready": False,
        "models": [],
        "version": "1",
        "ingress": {"host": "h", "pid": 1},
        "totals": totals,
        "replicas": [],
        "prefixes": [],
        "decisions": [],
        "updates": [],
        "metadata_store": {
            "store": "redis://h",
            "fault": "refused",
            "index_blocks": 1234,
            "lag_p95_s": 0.025,
            "gaps": 0,
            "resyncs": 0,
        },
        "scaling": [{"at": 0.0, "model": "m", "before": 1, "after": 2, "reason": "work waits"}],
    }
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(screen(state))
    text = console.export_text()
    for word in ("not ready", "no model", "away: refused", "1,234 blocks", "25.0 ms", "1 → 2: work waits"):
        assert word in text, word
