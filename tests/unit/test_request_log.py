"""Lines of JSON: one for each request that has ended, and the log of a process."""

import asyncio
import json
import logging

import pytest
from openai_harness import Rig, says

from warmroot.cluster.config import WarmrootConfig
from warmroot.cluster.errors import ConfigError, EngineError
from warmroot.cluster.messages import FirstTokenReport
from warmroot.cluster.observability_config import ObservabilityConfig
from warmroot.router.logs import PACKAGE, JsonFormatter, set_up_logging

REPORT = FirstTokenReport(queue_s=0.25, prefill_s=0.5, router_s=0.125, predicted_tokens=3)


async def logged(rig: Rig, path, count: int) -> list[dict]:
    for _ in range(500):
        lines = path.read_text().splitlines() if path.exists() else []
        if len(lines) >= count:
            return [json.loads(line) for line in lines]
        await asyncio.sleep(0.01)
    raise AssertionError(f"{count} lines did not come")


async def test_a_line_for_each_request(tmp_path):
    path = tmp_path / "requests.jsonl"
    rig = Rig(says("Hello!", cached_tokens=4, report=REPORT), request_log=str(path))
    response = await rig.complete("a secret", max_tokens=3)
    (entry,) = await logged(rig, path, 1)
    assert entry.pop("duration_s") >= 0
    assert entry.pop("first_token_s") >= 0
    assert entry.pop("time").startswith("2023-11-14T22:13:")
    assert entry == {
        "request_id": response.headers["x-request-id"],
        "trace": "",
        "route": "/v1/completions",
        "status": 200,
        "model": "tiny",
        "replica": "r0",
        "prompt_tokens": 8,
        "completion_tokens": 3,
        "cached_tokens": 4,
        "finish_reason": "length",
        "predicted_tokens": 3,
        "router_s": 0.125,
        "queue_s": 0.25,
        "prefill_s": 0.5,
    }
    assert "secret" not in path.read_text()


async def test_refusals_and_failures_have_a_line_and_probes_have_none(tmp_path):
    path = tmp_path / "requests.jsonl"
    script = says("ab")
    script.error = EngineError("gone")
    rig = Rig(script, request_log=str(path), api_keys=({"key": "sk-secret"},))
    async with rig.http() as client:
        await client.get("/health")
        await client.get("/metrics")
        await client.get("/v1/nothing")
        body = {"model": "tiny", "prompt": "x"}
        await client.post("/v1/completions", json=body, headers={"authorization": "Bearer sk-secret"})
    refused, failed = await logged(rig, path, 2)
    assert (refused["route"], refused["status"], refused["model"]) == ("other", 401, "")
    assert (failed["route"], failed["status"], failed["finish_reason"]) == ("/v1/completions", 500, "error")
    assert "sk-secret" not in path.read_text()


async def test_what_waits_is_written_when_the_application_ends(tmp_path):
    path = tmp_path / "requests.jsonl"
    rig = Rig(request_log=str(path))
    async with rig.app.router.lifespan_context(rig.app):
        for _ in range(20):
            assert (await rig.complete("x")).status_code == 200
    assert len(path.read_text().splitlines()) == 20


async def test_a_full_disk_costs_no_request():
    rig = Rig(request_log="/dev/full")
    for _ in range(3):
        assert (await rig.complete("x")).status_code == 200


def test_a_log_line_is_one_object():
    record = logging.LogRecord("warmroot.router", logging.WARNING, "f", 1, "two\nlines of %s", ("text",), None)
    record.request_id = "r1"
    line = JsonFormatter().format(record)
    assert "\n" not in line
    entry = json.loads(line)
    assert entry.pop("time").endswith("Z")
    assert entry == {
        "level": "warning",
        "logger": "warmroot.router",
        "message": "two\nlines of text",
        "request_id": "r1",
    }


def test_an_exception_is_told():
    try:
        raise ValueError("why")
    except ValueError as error:
        info = (type(error), error, error.__traceback__)
    record = logging.LogRecord("warmroot", logging.ERROR, "f", 1, "failed", (), info)
    assert "ValueError: why" in json.loads(JsonFormatter().format(record))["exception"]


@pytest.fixture
def restored():
    logger = logging.getLogger(PACKAGE)
    before = logger.handlers[:], logger.level, logger.propagate
    yield logger
    logger.handlers[:], logger.propagate = before[0], before[2]
    logger.setLevel(before[1])


def test_format_and_level_are_configured(restored, capsys):
    set_up_logging(ObservabilityConfig(log_format="json", log_level="info"))
    logging.getLogger(f"{PACKAGE}.router.x").info("hello")
    logging.getLogger(f"{PACKAGE}.router.x").debug("too fine")
    (line,) = capsys.readouterr().err.splitlines()
    assert json.loads(line)["message"] == "hello"
    set_up_logging(ObservabilityConfig())
    logging.getLogger(PACKAGE).info("not now")
    logging.getLogger(PACKAGE).warning("plain")
    assert capsys.readouterr().err.rstrip().endswith("WARNING warmroot: plain")


@pytest.mark.parametrize("endpoint", ["collector:4318", "ftp://c/v1/traces", "http://"])
def test_an_endpoint_is_a_url(endpoint):
    with pytest.raises(ConfigError, match="otlp_traces_endpoint"):
        WarmrootConfig.of("smollm2", otlp_traces_endpoint=endpoint)
