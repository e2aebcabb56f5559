"""Docs of API, routing and metrics: endpoints, fields, errors, streams, metrics and weights are those of the code."""

import json
import re
import shlex
from dataclasses import fields
from pathlib import Path

import pytest
from openai_harness import Rig, events, says
from prometheus_client.parser import text_string_to_metric_families

from warmroot.cluster import errors
from warmroot.router.openai.app import EXPOSED_HEADERS
from warmroot.router.openai.chat import ChatCompletionRequest, ChatMessage
from warmroot.router.openai.completions import CompletionRequest
from warmroot.router.openai.embeddings import EmbeddingRequest
from warmroot.router.openai.middleware_access import OPEN_PATHS, is_for_admins
from warmroot.router.openai.protocol import StreamOptions
from warmroot.router.openai.response_request import ResponseRequest
from warmroot.router.openai.tokens import DetokenizeRequest, TokenizeChatRequest, TokenizeCompletionRequest
from warmroot.router.policy import POLICIES, WarmPrefixWeights

DOCS = Path(__file__).parents[2] / "docs"
API = (DOCS / "api.md").read_text(encoding="utf-8")
ROUTING = (DOCS / "routing.md").read_text(encoding="utf-8")
METRICS = (DOCS / "metrics.md").read_text(encoding="utf-8")
ENDPOINT = re.compile(r"`(GET|POST) (/[^`]*)`")
CURLS = re.findall(r"^curl .*?(?=^curl |^```)", API, re.MULTILINE | re.DOTALL)
PAGES = {("GET", "/docs"), ("GET", "/openapi.json")}


def rig() -> Rig:
    rig = Rig(says("Red", size=3, embedding=bytes(8)))
    rig.frontends["smollm2"] = rig.frontend
    return rig


def section(text: str, title: str) -> str:
    """From a heading to the next of any level."""
    found = re.search(rf"^#+ {title}\n(.*?)(?=^#|\Z)", text, re.MULTILINE | re.DOTALL)
    assert found, title
    return found[1]


def routes(rig: Rig) -> set[tuple[str, str]]:
    paths = rig.app.openapi()["paths"]
    return {(method.upper(), path) for path, methods in paths.items() for method in methods} | PAGES


def test_endpoints_are_those_of_the_application():
    assert set(ENDPOINT.findall(section(API, "Endpoints"))) == routes(rig())


def test_endpoints_that_need_a_key():
    rows = [line for line in section(API, "Endpoints").splitlines() if ENDPOINT.search(line)]
    needed = {path for row in rows if row.endswith("| needed |") for _, path in ENDPOINT.findall(row)}
    admins = {path for row in rows if row.endswith("| an admin's |") for _, path in ENDPOINT.findall(row)}
    open_ = {
        path for row in rows if not row.endswith(("| needed |", "| an admin's |")) for _, path in ENDPOINT.findall(row)
    }
    assert admins
    assert all(map(is_for_admins, admins))
    assert not any(map(is_for_admins, needed | open_))
    assert open_ == OPEN_PATHS - {"/docs/oauth2-redirect"}
    assert needed | admins == {path for _, path in routes(rig())} - open_


async def curl(rig: Rig, command: str) -> tuple[str, int]:
    """Path and status of a curl command against the application."""
    _, url, *options = shlex.split(command)
    pairs = dict(zip(options[::2], options[1::2], strict=True))
    assert set(pairs) <= {"-H", "-d"}
    path = url.removeprefix("http://127.0.0.1:8000")
    body = pairs.get("-d")
    # What curl sends with -d unless it is told otherwise.
    headers = {"content-type": "application/x-www-form-urlencoded"} | dict(
        [pairs["-H"].split(": ")] if "-H" in pairs else []
    )
    async with rig.http() as client:
        if body is None:
            response = await client.get(path)
        else:
            response = await client.post(path, content=body, headers=headers)
    return path, response.status_code


@pytest.mark.parametrize("command", CURLS)
async def test_curl_commands_work(command):
    _, status = await curl(rig(), command)
    assert status == 200


def test_every_endpoint_has_a_curl_command():
    called = {shlex.split(command)[1].removeprefix("http://127.0.0.1:8000") for command in CURLS}
    called = {"/v1/models/{model}" if path == "/v1/models/smollm2" else path for path in called}
    assert called == {path for method, path in routes(rig()) if (method, path) not in PAGES}


@pytest.mark.parametrize(
    "model",
    [
        CompletionRequest,
        ChatCompletionRequest,
        ChatMessage,
        StreamOptions,
        TokenizeChatRequest,
        TokenizeCompletionRequest,
        DetokenizeRequest,
        EmbeddingRequest,
        ResponseRequest,
    ],
)
def test_every_field_is_named(model):
    named = set(re.findall(r"`(\w+)`", section(API, "Request fields") + section(API, "Refused fields")))
    assert set(model.model_fields) - named == set()


def test_refused_fields():
    named = set(re.findall(r"`(\w+)`", section(API, "Refused fields")))
    refused = {*ChatCompletionRequest.unsupported, *CompletionRequest.unsupported, "chat_template"}
    refused |= {"previous_response_id", "conversation", "prompt", "background", "top_logprobs", "include"}
    values = {"none", "auto", "tool", "function", "text"}
    assert named - values == refused


def test_headers_are_named():
    table = section(API, "Headers")
    assert [name for name in EXPOSED_HEADERS if f"`{name}`" not in table] == []


def test_errors_are_those_of_the_tree():
    rows = re.findall(r"^\| (\d+) \| `(\w+)` \|(?: `(\w+)`)? \|", section(API, "Errors"), re.MULTILINE)
    told = {(int(status), kind, code or None) for status, kind, code in rows}
    kinds = [errors.InvalidRequestError, errors.ContextTooLongError, errors.AuthenticationError]
    kinds += [errors.PermissionDeniedError, errors.HeadersTooLargeError]
    kinds += [errors.ModelNotFoundError, errors.PayloadTooLargeError, errors.OverloadedError]
    kinds += [
        errors.ReplicaUnavailableError,
        errors.DeadlineExceededError,
        errors.EngineError,
        errors.WeightsUpdateError,
    ]
    outside = {
        (404, "invalid_request_error", "not_found"),
        (405, "invalid_request_error", "method_not_allowed"),
        (500, "server_error", "internal_error"),
    }
    assert told == {(kind.status, kind.type, kind.code) for kind in kinds} | outside


def keys(value: object) -> object:
    """The shape of a JSON value: keys and nesting, without the values."""
    if isinstance(value, dict):
        return {key: keys(inner) for key, inner in value.items()}
    return [keys(inner) for inner in value] if isinstance(value, list) else None


async def test_the_stream_has_the_shape_of_the_example():
    [example] = re.findall(r"^```text\n(.*?)^```$", API, re.MULTILINE | re.DOTALL)
    response = await rig().chat(stream=True, stream_options={"include_usage": True})
    assert response.headers["content-type"].startswith("text/event-stream")
    assert [keys(event) for event in events(response.text)] == [keys(event) for event in events(example)]
    contents = [json.dumps(event) for event in events(example)]
    assert '"content": "Red"' in contents[1]
    assert '"finish_reason": "stop"' in contents[2]


async def test_metrics_are_those_of_the_exposition():
    rows = re.findall(r"^\| `((?:vllm|warmroot):\w+)` \| (.*?) \|", METRICS, re.MULTILINE)
    one = rig()
    one.cluster.stats = type(one.cluster.stats)(decisions={("warm_prefix", "warm"): 1})
    await one.chat()
    async with one.http() as client:
        exposition = (await client.get("/metrics")).text
    assert [name for name, _ in rows] == list(dict(rows))
    assert set(dict(rows)) == set(re.findall(r"^# TYPE ([\w:]+)", exposition, re.MULTILINE))
    for family in text_string_to_metric_families(exposition):
        told = set(re.findall(r"`(\w+)`", dict(rows).get(family.name, dict(rows).get(f"{family.name}_total", ""))))
        assert {frozenset(set(sample.labels) - {"le"}) for sample in family.samples} <= {frozenset(told)}, family.name


def test_weights_of_the_cost():
    rows = re.findall(r"^\| `(\w+)` \| ([\d.]+) \|$", section(ROUTING, "The cost of `warm_prefix`"), re.MULTILINE)
    defaults = WarmPrefixWeights()
    assert {name: float(value) for name, value in rows} == {
        weight.name: getattr(defaults, weight.name) for weight in fields(defaults)
    }


def test_policies_are_named():
    text = section(ROUTING, "Policies")
    assert [name for name in POLICIES if f"`{name}`" not in text] == []
