"""Every status, in the one shape of error bodies."""

import json
import logging

import pytest
from openai_harness import Rig, says
from scripted_generator import Script

from warmroot.cluster.errors import (
    DeadlineExceededError,
    EngineError,
    OverloadedError,
    ReplicaUnavailableError,
)
from warmroot.router.openai.cluster_state import ReplicaState

MESSAGES = [{"role": "user", "content": "Hi"}]


def error_of(response):
    body = response.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert response.headers["x-request-id"]
    return body["error"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"min_p": 1.5}, "min_p"),
        ({"n": 0}, "n"),
        ({"n": 129}, "n"),
        ({"n": "2"}, "n"),
        ({"best_of": 1, "n": 2}, "best_of"),
        ({"best_of": 2, "stream": True}, "best_of"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"max_completion_tokens": -1}, "max_completion_tokens"),
        ({"max_completion_tokens": 9999}, "max_completion_tokens"),
        ({"max_tokens": 9999}, "max_tokens"),
        ({"min_tokens": 5, "max_tokens": 2}, "min_tokens"),
        ({"stop": 5}, "stop"),
        ({"stop": ["a", ""]}, "stop"),
        ({"stop": ["a", 1]}, "stop.1"),
        ({"stop_token_ids": ["a"]}, "stop_token_ids.0"),
        ({"stop_token_ids": [100000]}, "stop_token_ids"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"frequency_penalty": -3}, "frequency_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"seed": "x"}, "seed"),
        ({"seed": 2**70}, "seed"),
        ({"logit_bias": {"a": 1}}, "logit_bias"),
        ({"logit_bias": {"1": 101}}, "logit_bias"),
        ({"logit_bias": {"100000": 1}}, "logit_bias"),
        ({"logit_bias": {"1": "x"}}, "logit_bias.1"),
        ({"logit_bias": []}, "logit_bias"),
        ({"logprobs": 3}, "logprobs"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"bad_words": "word"}, "bad_words"),
        ({"cache_salt": ""}, "cache_salt"),
        ({"request_id": "a b"}, "request_id"),
        ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
        ({"priority": "high"}, "priority"),
        ({"messages": []}, "messages"),
        ({"messages": "Hi"}, "messages"),
        ({"messages": None}, "messages"),
        ({"messages": [{"content": "Hi"}]}, "messages.0.role"),
        ({"messages": [{"role": "robot", "content": "Hi"}]}, "messages.0.role"),
        ({"messages": [*MESSAGES, {"role": "user", "content": 5}]}, "messages.1.content"),
        ({"messages": [{"role": "assistant"}]}, "messages.0.content"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages.0.content.0.text"),
        ({"add_generation_prompt": True, "continue_final_message": True}, "continue_final_message"),
        # Known, but not served:
        ({"tools": [{"type": "function"}]}, "tools.0.function"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"functions": [{}]}, "functions"),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format.json_schema.name"),
        ({"structured_outputs": {"structural_tag": "a"}}, "structured_outputs.structural_tag"),
        ({"guided_json": {"type": 1}}, "guided_json.type"),
        ({"use_beam_search": True}, "use_beam_search"),
        ({"modalities": ["audio"]}, "modalities"),
        ({"chat_template": "{{ x }}"}, "chat_template"),
        ({"echo": True}, "echo"),
        ({"messages": [{"role": "function", "content": "1"}]}, "messages.0.role"),
        ({"messages": [{"role": "assistant", "content": "", "tool_calls": [{}]}]}, "messages.0.tool_calls.0.function"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages.0.content.0.type"),
    ],
)
async def test_chat_field_at_fault_is_named(fields, param):
    rig = Rig()
    response = await rig.chat(**fields)
    assert response.status_code == 400
    error = error_of(response)
    assert (error["type"], error["param"]) == ("invalid_request_error", param)
    assert rig.generator.requests == []


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": 5}, "prompt"),
        ({"prompt": {"a": 1}}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": ["a", ""]}, "prompt"),
        ({"prompt": [[1], "a"]}, "prompt.1"),
        ({"prompt": [1, "a"]}, "prompt.1"),
        ({"prompt": [[1], [2, "a"]]}, "prompt.1.1"),
        ({"prompt": [True]}, "prompt.0"),
        ({"prompt": None}, "prompt"),
        ({"prompt": [1, 1000]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": ["a"] * 2049}, "prompt"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"suffix": "end"}, "suffix"),
        ({"prompt": "a" * 600}, "prompt"),
    ],
)
async def test_completion_field_at_fault_is_named(fields, param):
    rig = Rig()
    response = await rig.complete(**fields)
    assert response.status_code == 400
    assert (error_of(response)["type"], error_of(response)["param"]) == ("invalid_request_error", param)
    assert rig.generator.requests == []


async def test_missing_fields():
    rig = Rig()
    assert error_of(await rig.post("/v1/completions", {}))["param"] == "prompt"
    assert error_of(await rig.post("/v1/chat/completions", {}))["param"] == "messages"


async def test_context_length():
    for stream in (False, True):
        response = await Rig(max_model_len=10).chat("too long", stream=stream)
        assert response.status_code == 400
        error = error_of(response)
        assert (error["code"], error["param"]) == ("context_length_exceeded", "messages")


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[1,", b'{"messages": }', b"\xff\xfe{}", b"nonsense", b"[" * 10000, b'{"model": "\\ud800"}']
)
async def test_bad_json_is_400(body):
    async with Rig().http() as client:
        response = await client.post("/v1/chat/completions", content=body, headers={"content-type": "application/json"})
    assert response.status_code == 400
    assert error_of(response)["type"] == "invalid_request_error"


@pytest.mark.parametrize("body", [b"5", b"null", b"[]", b'"text"'])
async def test_json_that_is_no_object_is_400(body):
    async with Rig().http() as client:
        response = await client.post("/v1/completions", content=body, headers={"content-type": "application/json"})
    assert response.status_code == 400
    assert "JSON object" in error_of(response)["message"]


async def test_another_content_type_is_400_and_none_is_json():
    async with Rig().http() as client:
        form = await client.post("/v1/completions", data={"prompt": "x"})
        bare = await client.post("/v1/completions", content=b'{"prompt": "x"}')
    assert (form.status_code, bare.status_code) == (400, 200)
    assert "content-type" in error_of(form)["message"]


@pytest.mark.parametrize(
    ("content_type", "status"),
    [
        ("application/json; charset=utf-8", 200),
        (" Application/JSON ", 200),
        ("application/vnd.api+json", 200),
        ("", 200),
        (None, 200),
        ("text/plain", 400),
        ("bogus", 400),
        ("text/x+json", 400),
    ],
)
async def test_json_by_any_of_its_names(content_type, status):
    headers = {} if content_type is None else {"content-type": content_type}
    async with Rig().http() as client:
        answer = await client.post("/v1/completions", content=b'{"prompt": "Hi"}', headers=headers)
    assert answer.status_code == status, answer.text


async def test_harmless_and_unknown_fields_are_accepted():
    fields = {
        "user": "u",
        "metadata": {"a": "b"},
        "store": True,
        "service_tier": "auto",
        "parallel_tool_calls": True,
        "tools": [],
        "tool_choice": "none",
        "response_format": {"type": "text"},
        "modalities": ["text"],
        "use_beam_search": False,
        "length_penalty": 1.0,
        "best_of": None,
        "stop": None,
        "logit_bias": None,
        "spaces_between_special_tokens": True,
        "nobody_knows_this": [1],
    }
    assert (await Rig().chat(**fields)).status_code == 200


async def test_unknown_model_is_404():
    for response in (
        await Rig().chat(model="nope"),
        await Rig().complete(model="nope"),
        await Rig().post("/tokenize", {"model": "nope", "prompt": "x"}),
    ):
        assert response.status_code == 404
        assert error_of(response)["code"] == "model_not_found"


async def test_before_a_model_is_known_it_is_503():
    rig = Rig()
    rig.frontends.clear()
    response = await rig.chat()
    assert response.status_code == 503
    assert response.headers["retry-after"] == "1"


@pytest.mark.parametrize(
    ("method", "path", "template", "body"),
    [
        ("POST", "/v1/completions", None, {"prompt": "x"}),
        ("POST", "/tokenize", None, {"prompt": "x"}),
        ("POST", "/detokenize", None, {"tokens": [1]}),
        ("GET", "/v1/models/tiny", "/v1/models/{model}", None),
    ],
)
async def test_what_needs_a_model_tells_in_the_document_that_there_may_be_none(method, path, template, body):
    rig = Rig()
    rig.frontends.clear()
    async with rig.http() as client:
        response = await client.request(method, path, json=body)
        document = (await client.get("/openapi.json")).json()
    assert response.status_code == 503
    assert "503" in document["paths"][template or path][method.lower()]["responses"]


async def test_unknown_path_and_method():
    async with Rig().http() as client:
        missing, method = await client.get("/v1/nothing"), await client.get("/v1/completions")
    assert (missing.status_code, error_of(missing)["code"]) == (404, "not_found")
    assert (method.status_code, error_of(method)["code"]) == (405, "method_not_allowed")
    assert method.headers["allow"] == "POST"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("error", "status", "type_", "code"),
    [
        (OverloadedError("full", retry_after=2.3), 429, "rate_limit_error", "rate_limit_exceeded"),
        (ReplicaUnavailableError("none"), 503, "service_unavailable", "replica_unavailable"),
        (DeadlineExceededError("late"), 504, "timeout_error", "deadline_exceeded"),
        (EngineError("broken"), 500, "server_error", "engine_error"),
    ],
)
async def test_refusals_have_their_status_streamed_or_not(stream, error, status, type_, code):
    rig = Rig(Script([], error=error))
    response = await rig.chat(stream=stream)
    assert response.status_code == status
    assert error_of(response) == {"message": error.message, "type": type_, "param": None, "code": code}
    assert rig.generator.live == 0


async def test_retry_after_is_whole_seconds_and_exact_milliseconds():
    headers = (await Rig(Script([], error=OverloadedError("full", retry_after=2.3))).chat()).headers
    assert (headers["retry-after"], headers["retry-after-ms"]) == ("3", "2300")
    headers = (await Rig(Script([], error=OverloadedError("full", retry_after=0.0))).chat()).headers
    assert (headers["retry-after"], headers["retry-after-ms"]) == ("1", "1")


@pytest.mark.parametrize("stream", [False, True])
async def test_a_bug_is_a_500_without_details(stream, caplog):
    with caplog.at_level(logging.ERROR):
        response = await Rig(Script([], error=RuntimeError("secret detail"))).chat(stream=stream)
    assert response.status_code == 500
    error = error_of(response)
    assert error["message"] == "internal error (request id1)"
    assert "secret" not in response.text
    assert "secret detail" in caplog.text
    assert "id1" in caplog.text


async def test_body_limit():
    rig = Rig(max_body_bytes=1000)
    response = await rig.complete("x" * 1000)
    assert response.status_code == 413
    assert error_of(response)["code"] == "payload_too_large"

    taken = 0

    async def chunks():
        nonlocal taken
        for _ in range(40):
            taken += 1
            yield b"x" * 2**20

    async with rig.http() as client:
        response = await client.post("/v1/completions", content=chunks())
    assert response.status_code == 413
    assert taken <= 18  # it stopped to read
    assert (await rig.complete("x" * 100)).status_code == 200


KEYS = {"api_keys": ({"key": "sk-one", "tenant": "acme"}, {"key": "sk-two"})}


@pytest.mark.parametrize(
    "authorization",
    [None, "", "Bearer", "Bearer ", "Bearer wrong", "Bearer sk-one2", "Basic sk-one", "sk-one", "Bearer sk-onë"],
)
async def test_wrong_or_missing_key_is_401(authorization, caplog):
    headers = {} if authorization is None else {"authorization": authorization.encode()}
    with caplog.at_level(logging.DEBUG):
        response = await Rig(**KEYS).post("/v1/completions", {"prompt": "x"}, headers=headers)
    assert response.status_code == 401
    assert error_of(response)["code"] == "invalid_api_key"
    assert response.headers["www-authenticate"] == "Bearer"
    assert "sk-" not in response.text + caplog.text


async def test_every_key_opens_and_probes_need_none():
    rig = Rig(**KEYS)
    for key in ("sk-one", "sk-two"):
        headers = {"authorization": f"Bearer {key}"}
        assert (await rig.post("/v1/completions", {"prompt": "x"}, headers=headers)).status_code == 200
    async with rig.http() as client:
        for path in ("/health", "/livez", "/readyz", "/ping", "/metrics", "/version", "/docs", "/openapi.json"):
            assert (await client.get(path)).status_code == 200
        for path in ("/v1/models", "/load", "/v1/nothing"):
            assert (await client.get(path)).status_code == 401


async def test_time_limits_come_from_the_body_and_from_headers_that_clients_and_gateways_send():
    rig = Rig()

    async def left(headers, **fields):
        response = await rig.post("/v1/completions", {"prompt": "x", **fields}, headers=headers)
        assert response.status_code == 200
        request = rig.generator.requests[-1]
        return request.deadline and round(request.deadline - request.arrival, 3)

    assert await left({}) == 0
    assert await left({}, timeout=2.5) == 2.5
    assert await left({"Request-Timeout-Ms": "1500"}, timeout=2.5) == 1.5
    assert await left({"X-Request-Timeout-Seconds": "3", "x-envoy-expected-rq-timeout-ms": "4000"}) == 3
    assert await left({"x-litellm-timeout": "-1"}) == 0
    for headers, fields in (
        ({"request-timeout-ms": "soon"}, {}),
        ({"x-litellm-timeout": "inf"}, {}),
        ({}, {"timeout": 0}),
    ):
        response = await rig.post("/v1/completions", {"prompt": "x", **fields}, headers=headers)
        assert response.status_code == 400, (headers, fields)


async def test_a_session_is_named_by_a_header_or_the_body():
    rig = Rig()

    async def session(headers, **fields):
        response = await rig.post("/v1/completions", {"prompt": "x", **fields}, headers=headers)
        assert response.status_code == 200
        return rig.generator.requests[-1].session

    assert await session({}) == ""
    assert await session({}, session_id="body") == "body"
    assert await session({"X-Session-ID": "ours", "X-Dynamo-Session-ID": "theirs"}, session_id="body") == "ours"
    assert await session({"X-Dynamo-Session-ID": "theirs"}) == "theirs"
    assert await session({"X-SMG-Routing-Key": "key", "x-session-id": "s" * 257}) == "key"
    refused = await rig.post("/v1/completions", {"prompt": "x", "session_id": ""})
    assert (refused.status_code, error_of(refused)["param"]) == (400, "session_id")


async def test_cache_salt_stays_within_the_tenant():
    rig = Rig(**KEYS)

    async def salt(key, **fields):
        await rig.post("/v1/completions", {"prompt": "x", **fields}, headers={"authorization": f"Bearer {key}"})
        return rig.generator.requests[-1].cache_salt

    assert await salt("sk-two") == ""
    salts = [
        await salt(key, **fields)
        for key in ("sk-one", "sk-two")
        for fields in ({"cache_salt": "a"}, {"cache_salt": "b"})
    ]
    salts += [await salt("sk-one"), await salt("sk-two", cache_salt="4:acme:"), await salt("sk-two", cache_salt="acme")]
    assert len(set(salts)) == len(salts)
    assert all(salts)


async def test_keys_do_not_show_in_settings():
    assert "sk-one" not in repr(Rig(**KEYS).app.__dict__)


async def test_request_ids():
    rig = Rig()
    given = await rig.post("/v1/completions", {"prompt": "x"}, headers={"x-request-id": "my-id.1"})
    assert (given.headers["x-request-id"], given.json()["id"]) == ("my-id.1", "cmpl-my-id.1")
    for wrong in ("a b", "x" * 129, "<script>", "é"):
        response = await rig.post("/v1/completions", {"prompt": "x"}, headers={"x-request-id": wrong.encode()})
        assert response.headers["x-request-id"].startswith("id")
    body = await rig.complete(request_id="from-body")
    assert (body.headers["x-request-id"], body.json()["id"]) == ("from-body", "cmpl-from-body")
    engine_ids = [request.request_id for request in rig.generator.requests]
    assert len(set(engine_ids)) == len(engine_ids)


async def test_the_same_request_id_twice_is_two_requests():
    rig = Rig()
    for _ in range(2):
        await rig.post("/v1/completions", {"prompt": "x"}, headers={"x-request-id": "same"})
    first, second = rig.generator.requests
    assert first.request_id != second.request_id


async def test_readiness():
    rig = Rig()
    async with rig.http() as client:
        for state in ReplicaState:
            rig.cluster.state = state
            expected = 200 if state is ReplicaState.READY else 503
            for path in ("/health", "/readyz", "/ping"):
                response = await client.get(path)
                assert response.status_code == expected
                assert expected == 200 or error_of(response)["code"] == "replica_unavailable"
            assert (await client.get("/livez")).status_code == 200


async def test_cors_preflight_needs_no_key():
    headers = {"origin": "https://app.example", "access-control-request-method": "POST"}
    async with Rig(**KEYS).http() as client:
        response = await client.options("/v1/completions", headers=headers)
        refused = await client.post("/v1/completions", json={}, headers={"origin": "https://app.example"})
    assert response.status_code == 200
    assert refused.status_code == 401
    assert refused.headers["access-control-allow-origin"] == "*"


async def test_unicode_survives():
    rig = Rig(says("日本語🎉"))
    response = await rig.chat("ü🎉")
    assert json.loads(response.content)["choices"][0]["message"]["content"] == "日本語🎉"
    assert bytes(rig.generator.requests[0].prompt_token_ids) == "<user>ü🎉\n<assistant>".encode()


async def test_root_path_is_left_out_of_paths():
    rig = Rig(root_path="/llm", **KEYS)
    async with rig.http() as client:
        assert (await client.get("/llm/health")).status_code == 200
        assert (await client.get("/llm/v1/models")).status_code == 401
        listed = await client.get("/llm/v1/models", headers={"authorization": "Bearer sk-two"})
    assert listed.status_code == 200
