"""The audit log: what it says of each request, what it never says, and disks that fail."""

import json
import os
from pathlib import Path

import pytest
from manual_clock import ManualClock
from openai_harness import Rig, says

from warmroot.router import json_lines as module
from warmroot.router.json_lines import JsonLines

SECRET = "sk-canary-0123456789"


def written(log: JsonLines, path: Path) -> list[dict]:
    log.close()
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture
def opened(monkeypatch):
    """Every log that an application opens."""
    logs = []

    class Opened(JsonLines):
        def __init__(self, *args):
            super().__init__(*args)
            logs.append(self)

    monkeypatch.setattr("warmroot.router.openai.tenancy.JsonLines", Opened)
    return logs


async def test_a_line_for_each_request(tmp_path, opened):
    path = tmp_path / "audit.jsonl"
    rig = Rig(
        says("A secret answer", cached_tokens=4), api_keys=({"key": SECRET, "tenant": "acme"},), audit_log=str(path)
    )
    headers = {"authorization": f"Bearer {SECRET}", "x-request-id": "mine", "x-forwarded-for": "10.0.0.9"}
    for stream in (False, True):
        body = {"prompt": "A secret question", "stream": stream}
        assert (await rig.post("/v1/completions?key=" + SECRET, body, headers=headers)).status_code == 200
    await rig.post("/v1/completions", {"prompt": "x"}, headers={"authorization": "Bearer wrong-canary"})
    await rig.post("/v1/completions", {"prompt": "x", "model": "secret-model"}, headers=headers)
    async with rig.http() as client:
        await client.get("/metrics")
        await client.get("/v1/models", headers=headers)
    lines = written(opened[0], path)
    whole, stream, refused, unknown, models = lines
    assert whole == {
        "time": "2023-11-14T22:13:20.500+00:00",
        "request_id": "mine",
        "key": "flag-1",
        "tenant": "acme",
        "method": "POST",
        "endpoint": "/v1/completions",
        "model": "tiny",
        "status": 200,
        "prompt_tokens": 17,
        "completion_tokens": 16,
        "cached_tokens": 4,
        "replica": "r0",
        "duration_s": whole["duration_s"],
        "client": "127.0.0.1",
        "forwarded_for": "10.0.0.9",
    }
    assert {**stream, "duration_s": 0} == {**whole, "duration_s": 0}
    assert (refused["status"], refused["key"], refused["prompt_tokens"]) == (401, "", None)
    assert (unknown["status"], unknown["key"], unknown["model"]) == (404, "flag-1", "")
    assert (models["endpoint"], models["status"], models["method"]) == ("/v1/models", 200, "GET")
    text = path.read_text()
    for word in (SECRET, "wrong-canary", "secret", "question", "answer"):
        assert word not in text
    assert path.stat().st_mode & 0o777 == 0o640


async def test_a_bug_is_a_500(tmp_path, opened):
    path = tmp_path / "audit.jsonl"
    rig = Rig(lambda request: 1 / 0, audit_log=str(path))
    assert (await rig.complete()).status_code == 500
    [line] = written(opened[0], path)
    assert (line["status"], line["completion_tokens"]) == (500, 0)


def test_a_file_that_was_moved_away_is_opened_anew(tmp_path):
    path = tmp_path / "audit.jsonl"
    log = JsonLines(str(path), "audit log")
    log.add({"n": 1})
    while not path.exists() or not path.read_text():
        pass
    os.rename(path, tmp_path / "audit.1")
    log.add({"n": 2})
    log.close()
    assert ((tmp_path / "audit.1").read_text(), path.read_text()) == ('{"n":1}\n', '{"n":2}\n')


def test_a_full_disk_loses_lines_and_complains_once_a_minute(caplog):
    clock = ManualClock()
    log = JsonLines("/dev/full", "audit log", clock)
    for number in range(10):
        log.add({"n": number})
    log.close()
    assert log.lost == 10
    assert caplog.text.count("No space left on device") == 1
    clock.now = 60.0
    log._lose("again")
    assert caplog.text.count("lost so far") == 2


def test_a_folder_that_is_not_there(tmp_path, caplog):
    path = tmp_path / "later" / "audit.jsonl"
    log = JsonLines(str(path), "audit log")
    log.add({"n": 1})
    while not log.lost:
        pass
    path.parent.mkdir()
    log.add({"n": 2})
    log.close()
    assert path.read_text() == '{"n":2}\n'
    assert caplog.text.count("No such file") == 1


def test_a_line_that_a_full_disk_cut_off_does_not_spoil_the_next(tmp_path, monkeypatch):
    path, write = tmp_path / "audit.jsonl", os.write
    room = [3, 0]

    def short(descriptor, data):
        return write(descriptor, data[: room.pop(0)]) if room else write(descriptor, data)

    monkeypatch.setattr(module.os, "write", short)
    log = JsonLines(str(path), "audit log")
    for number in range(4):
        log.add({"n": number})
    log.close()
    assert path.read_text().splitlines() == ['{"n', '{"n":2}', '{"n":3}']
    assert log.lost == 2


def test_a_disk_that_hangs_holds_nobody_up(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "MOST_WAITING", 5)
    path = tmp_path / "pipe"
    os.mkfifo(path)  # opening it waits for a reader
    log = JsonLines(str(path), "audit log")
    for number in range(50):
        log.add({"n": number})
    assert log.lost >= 44
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    log.close()
    assert os.read(reader, 10) == b'{"n":0}\n{"'
    os.close(reader)


async def test_serving_goes_on_and_the_metric_counts(opened):
    rig = Rig(audit_log="/dev/full")
    for _ in range(3):
        assert (await rig.complete()).status_code == 200
    opened[0].close()
    async with rig.http() as client:
        assert "warmroot:audit_lines_lost_total 3.0" in (await client.get("/metrics")).text


async def test_what_waits_is_written_when_the_application_ends(tmp_path):
    path = tmp_path / "audit.jsonl"
    rig = Rig(audit_log=str(path))
    async with rig.app.router.lifespan_context(rig.app):
        for _ in range(20):
            assert (await rig.complete()).status_code == 200
    assert len(path.read_text().splitlines()) == 20


def test_stderr(capsys):
    log = JsonLines("stderr", "audit log")
    log.add({"n": 1})
    log.close()
    assert capsys.readouterr().err == '{"n":1}\n'


def test_a_reader_of_stderr_that_is_gone_costs_only_lines(monkeypatch, caplog):
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as pipe:
        monkeypatch.setattr(module.sys, "stderr", pipe)
        log = JsonLines("stderr", "audit log")
        for number in range(3):
            log.add({"n": number})
        log.close()
        monkeypatch.undo()
        os.dup2(os.open(os.devnull, os.O_WRONLY), writer)  # what is still buffered goes somewhere
    assert log.lost == 3
    assert caplog.text.count("Broken pipe") == 1
