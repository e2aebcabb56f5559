"""What keys open, what they may ask for, and what their limits do, over HTTP."""

import asyncio
import json
import threading

import httpx
import pytest
from openai_harness import Rig, events, says
from scripted_generator import Script

from warmroot.cluster.errors import EngineError, OverloadedError
from warmroot.router.openai.cluster_state import CandidateCost, RoutingChoice
from warmroot.router.tenancy.key_ring import hash_text
from warmroot.router.tenancy.rate_limits import RateLimiter

ADMIN_PATHS = ("/admin/state", "/admin/routing/explain", "/console/state", "/console/nothing.js")


def bearer(key):
    return {"authorization": f"Bearer {key}"}


def keys_file(folder, *entries, tenants=None):
    """A file with these keys; each is its own name."""
    path = folder / "keys.yaml"
    keys = [{"name": key, "hash": hash_text(key), **fields} for key, fields in entries]
    path.write_text(json.dumps({"keys": keys, "tenants": tenants or {}}))
    return {"api_keys_file": str(path)}


async def get(rig, path, key=None):
    async with rig.http() as client:
        return await client.get(path, headers=bearer(key) if key else {})


def code(response):
    return response.status_code, response.json()["error"]["code"]


async def ask(rig, key=None, path="/v1/completions", **fields):
    body = {"prompt": "Hi", "max_tokens": 3, **fields}
    return await rig.post(path, body, headers=bearer(key) if key else {})


async def test_admins_only_once_there_are_keys(tmp_path):
    for settings, admin in (
        ({"api_keys": ({"key": "user"},), "admin_keys": ("root",)}, "root"),
        (keys_file(tmp_path, ("user", {}), ("chief", {"admin": True})), "chief"),
        ({"api_keys": ({"key": "user"},)}, None),
    ):
        rig = Rig(**settings)
        for path in ADMIN_PATHS:
            assert code(await get(rig, path)) == (401, "invalid_api_key")
            assert code(await get(rig, path, "wrong")) == (401, "invalid_api_key")
            assert code(await get(rig, path, "user")) == (403, "permission_denied")
        assert (await get(rig, "/v1/models", "user")).status_code == 200
        if admin is not None:
            assert (await get(rig, "/admin/state", admin)).status_code == 200
            assert (await get(rig, "/v1/models", admin)).status_code == 200


async def test_an_admins_key_alone_leaves_the_rest_open():
    rig = Rig(admin_keys=("root",))
    assert (await ask(rig)).status_code == 200
    assert (await ask(rig, "whatever")).status_code == 200
    assert code(await get(rig, "/admin/state")) == (401, "invalid_api_key")
    assert (await get(rig, "/admin/state", "root")).status_code == 200


async def test_without_keys_admins_are_those_who_can_reach_it_or_nobody():
    assert (await get(Rig(), "/admin/state")).status_code == 200
    closed = Rig(open_admin=False)
    assert code(await get(closed, "/admin/state")) == (403, "permission_denied")
    assert (await ask(closed)).status_code == 200


async def test_a_path_that_only_looks_like_an_admins():
    assert code(await get(Rig(open_admin=False), "/administration")) == (404, "not_found")


async def test_a_root_path_cuts_whole_segments_only():
    rig = Rig(api_keys=({"key": "user"},), root_path="/a")
    assert code(await get(rig, "/admin/state", "user")) == (403, "permission_denied")


async def test_the_admins_part_under_a_root_path():
    rig = Rig(api_keys=({"key": "user"},), root_path="/llm")
    for path in ("/llm/admin/state", "/admin/state"):
        assert code(await get(rig, path, "user")) == (403, "permission_denied")


async def test_an_empty_file_of_keys_lets_nobody_in(tmp_path):
    rig = Rig(**keys_file(tmp_path))
    assert code(await ask(rig)) == (401, "invalid_api_key")
    assert code(await get(rig, "/admin/state")) == (401, "invalid_api_key")


async def test_metrics_may_need_a_key():
    assert (await get(Rig(api_keys=({"key": "k"},)), "/metrics")).status_code == 200
    rig = Rig(api_keys=({"key": "k"},), protect_metrics=True)
    assert (await get(rig, "/metrics")).status_code == 401
    assert (await get(rig, "/metrics", "k")).status_code == 200


async def test_a_model_that_is_not_for_a_key_does_not_exist(tmp_path):
    rig = Rig(**keys_file(tmp_path, ("one", {"models": ["alias"]}), ("none", {"models": []}), ("all", {})))
    missing, hidden = await ask(rig, "one", model="no"), await ask(rig, "one", model="tiny")
    assert code(hidden) == code(missing) == (404, "model_not_found")
    assert hidden.text == missing.text.replace("'no'", "'tiny'")
    assert (await ask(rig, "one")).json()["model"] == "alias"
    assert (await ask(rig, "all")).json()["model"] == "tiny"
    assert code(await ask(rig, "none")) == (404, "model_not_found")
    for key, names in (("one", ["alias"]), ("all", ["tiny", "alias"]), ("none", [])):
        assert [card["id"] for card in (await get(rig, "/v1/models", key)).json()["data"]] == names
    assert code(await get(rig, "/v1/models/tiny", "one")) == (404, "model_not_found")
    for path, body in (("/tokenize", {"prompt": "x"}), ("/detokenize", {"tokens": [1]})):
        response = await rig.post(path, {"model": "tiny", **body}, headers=bearer("one"))
        assert code(response) == (404, "model_not_found")


async def test_priorities_have_a_ceiling_and_tenants_a_share(tmp_path):
    rig = Rig(**keys_file(tmp_path, ("low", {"max_priority": 5, "tenant": "t", "share": 2.5}), ("free", {})))

    async def seen(key, **fields):
        assert (await ask(rig, key, **fields)).status_code == 200
        request = rig.generator.requests[-1]
        return request.priority, request.tenant, request.share

    assert await seen("low") == (5, "t", 2.5)
    assert await seen("low", priority=-3) == (5, "t", 2.5)
    assert await seen("low", priority=9) == (9, "t", 2.5)
    assert await seen("free", priority=-3) == (-3, "", 1.0)


async def test_caches_and_sessions_are_a_tenants_own_unless_a_group_shares(tmp_path):
    tenants = (("a", {"tenant": "a"}), ("a2", {"tenant": "a"}), ("b", {"tenant": "b"}), ("none", {}))
    grouped = (("g1", {"tenant": "a", "cache_group": "g"}), ("g2", {"tenant": "b", "cache_group": "g"}))
    rig = Rig(**keys_file(tmp_path, *tenants, *grouped))

    async def seen(key, **fields):
        assert (await ask(rig, key, session_id="s", **fields)).status_code == 200
        request = rig.generator.requests[-1]
        return request.cache_salt, request.session

    found = {key: await seen(key) for key, _ in (*tenants, *grouped)}
    assert found["a"] == found["a2"]
    assert len({salt for salt, _ in found.values()}) == 4
    assert found["g1"][0] == found["g2"][0]
    assert found["a"][1] == found["g1"][1]
    assert len({found[key][1] for key in ("a", "b", "none")}) == 3
    salts, sessions = zip(*found.values(), strict=True)
    for salt in ("group 1:g:", "1:a:", *filter(None, salts)):
        assert (await seen("none", cache_salt=salt))[0] not in salts
    response = await rig.post("/v1/completions", {"prompt": "x", "session_id": found["a"][1]}, headers=bearer("none"))
    assert response.status_code == 200
    assert rig.generator.requests[-1].session not in sessions


async def test_why_a_request_went_there_is_told_of_that_request_only():
    """Another's request whose id begins as this one's, or is the same, is never shown."""
    rig, asked = Rig(), []

    def explain(request_id="", limit=1):
        asked.append(request_id)
        candidate = CandidateCost(replica="r0", cost=0.1, cached_tokens=0, reason="warm")
        return [
            RoutingChoice(
                request_id=request_id,
                prompt_tokens=2,
                replica="r0",
                reason="warm",
                predicted_tokens=0,
                actual_tokens=0,
                decided_in_s=0.0,
                refusals=(),
                candidates=(candidate,),
            )
        ]

    rig.cluster.explain = explain
    headers = {"x-request-id": "a", "x-warmroot-explain": "1"}
    response = await rig.post("/v1/completions", {"prompt": "x"}, headers=headers)
    assert "x-warmroot-routing" in response.headers
    assert rig.generator.requests[-1].request_id.startswith(asked[0])
    assert asked[0] not in ("cmpl-a-", "cmpl-a")
    await rig.post("/v1/completions", {"prompt": "x"}, headers=headers)
    assert asked[1] != asked[0]


def limits(response, kind="tokens"):
    return [response.headers.get(f"x-ratelimit-{fact}-{kind}") for fact in ("limit", "remaining", "reset")]


async def test_requests_per_minute(tmp_path):
    rig = Rig(**keys_file(tmp_path, ("k", {"requests_per_minute": 2}), ("free", {})))
    first = await ask(rig, "k")
    assert (first.status_code, limits(first, "requests")[:2]) == (200, ["2", "1"])
    assert limits(first) == [None] * 3
    stream = await ask(rig, "k", stream=True)
    assert (stream.status_code, limits(stream, "requests")[:2]) == (200, ["2", "0"])
    assert events(stream.text)[-1] == "[DONE]"
    refused = await ask(rig, "k")
    assert code(refused) == (429, "rate_limit_exceeded")
    assert refused.json()["error"]["type"] == "rate_limit_error"
    assert 1 <= int(refused.headers["retry-after"]) <= 30
    assert 0 < int(refused.headers["retry-after-ms"]) <= 30_000
    assert limits(refused, "requests")[:2] == ["2", "0"]
    assert code(await rig.post("/tokenize", {"prompt": "x"}, headers=bearer("k"))) == (429, "rate_limit_exceeded")
    for path in ("/v1/models", "/load"):
        assert (await get(rig, path, "k")).status_code == 200
    free = await ask(rig, "free")
    assert (free.status_code, limits(free, "requests")) == (200, [None] * 3)
    exposition = (await get(rig, "/metrics")).text
    assert 'warmroot:rate_limited_total{limit="requests"} 2.0' in exposition
    assert 'warmroot:rate_limited_total{limit="tokens"} 0.0' in exposition


def remaining(response):
    return int(response.headers["x-ratelimit-remaining-tokens"])


async def test_tokens_are_charged_as_they_were_used(tmp_path, monkeypatch):
    """Time stands still, so that nothing refills."""
    monkeypatch.setattr("warmroot.router.openai.tenancy.RateLimiter", lambda _, *rest: RateLimiter(lambda: 0.0, *rest))
    rig = Rig(says("Hello!"), **keys_file(tmp_path, ("k", {"tokens_per_minute": 100_000})))
    response = await ask(rig, "k", max_tokens=400)
    assert response.json()["usage"]["total_tokens"] == 2 + 7
    assert remaining(response) == 100_000 - 402
    used = 9

    async def reserves(expected, **fields):
        """Reserves so much, while all that went before is charged as it was used."""
        answer = await ask(rig, "k", **fields)
        assert remaining(answer) == 100_000 - used - expected
        return answer

    await reserves(2 + 3)
    used += 5
    await reserves(2 * (2 + 3 * 2), prompt=["Hi", "Ho"], n=2)
    used += 2 * 2 + 4 * 3
    chat = {"path": "/v1/chat/completions", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": None}
    await reserves(len("<user>Hi\n<assistant>") + 256, **chat)


@pytest.mark.parametrize(
    "script",
    [Script([], error=OverloadedError("full", retry_after=1.0)), Script([], error=EngineError("broken"))],
)
async def test_what_was_refused_or_failed_costs_no_tokens(tmp_path, script):
    rig = Rig(script, **keys_file(tmp_path, ("k", {"tokens_per_minute": 1000})))
    for _ in range(20):
        assert (await ask(rig, "k", max_tokens=400)).status_code in (429, 500)
    assert remaining(await ask(rig, "k", max_tokens=400)) >= 1000 - 402
    assert code(await ask(rig, "k", max_tokens=400, temperature=-1))[0] == 400


async def test_a_client_that_leaves_pays_for_what_it_got(tmp_path):
    script = Script([[65]], delay=0.01, forever=True)
    rig = Rig(script, **keys_file(tmp_path, ("k", {"tokens_per_minute": 1000})))
    async with rig.listening() as url, httpx.AsyncClient(base_url=url, headers=bearer("k")) as client:
        body = {"prompt": "Hi", "max_tokens": 400, "stream": True}
        async with client.stream("POST", "/v1/completions", json=body) as response:
            assert remaining(response) <= 1000 - 402 + 1
            async for _ in response.aiter_lines():
                break
        await rig.idle()
        for _ in range(1000):
            answer = await client.post("/v1/completions", json={"prompt": "Hi", "max_tokens": 1})
            if remaining(answer) > 800:
                break
            await asyncio.sleep(0.01)
        assert 800 < remaining(answer) < 1000


async def test_tokens_over_the_limit_are_refused_until_there_are_enough(tmp_path):
    rig = Rig(says("x" * 90), **keys_file(tmp_path, ("k", {"tokens_per_minute": 100})))
    assert (await ask(rig, "k", max_tokens=90)).status_code == 200
    refused = await ask(rig, "k", max_tokens=90)
    assert code(refused) == (429, "rate_limit_exceeded")
    assert "limit 100, left 8, requested 92" in refused.json()["error"]["message"]
    assert 45 <= int(refused.headers["retry-after"]) <= 51
    assert rig.generator.started == 1


LIMITS = {
    "max_messages": 3,
    "max_prompts": 4,
    "max_completions": 4,
    "max_total_completions": 8,
    "max_output_tokens": 50,
    "max_logprobs": 5,
    "max_stop_strings": 2,
    "max_stop_length": 10,
    "max_logit_bias": 2,
    "max_bad_words": 2,
    "max_token_ids": 3,
    "max_prompt_chars": 300,
    "max_header_bytes": 2000,
    "max_json_values": 1024,
}


@pytest.mark.parametrize(
    ("fields", "param", "limit"),
    [
        ({"prompt": ["x"] * 5}, "prompt", "max_prompts"),
        ({"prompt": "x" * 301}, "prompt", "max_prompt_chars"),
        ({"prompt": ["x" * 200, "y" * 101]}, "prompt", "max_prompt_chars"),
        ({"n": 5}, "n", "max_completions"),
        ({"best_of": 5}, "best_of", "max_completions"),
        ({"prompt": ["x"] * 3, "n": 3}, "n", "max_total_completions"),
        ({"prompt": ["x"] * 3, "best_of": 3}, "best_of", "max_total_completions"),
        ({"max_tokens": 51}, "max_tokens", "max_output_tokens"),
        ({"logprobs": 6}, "logprobs", "max_logprobs"),
        ({"prompt_logprobs": 6}, "prompt_logprobs", "max_logprobs"),
        ({"stop": ["a", "b", "c"]}, "stop", "max_stop_strings"),
        ({"stop": "x" * 11}, "stop", "max_stop_length"),
        ({"stop": ["a", "x" * 11]}, "stop", "max_stop_length"),
        ({"logit_bias": {"1": 1, "2": 1, "3": 1}}, "logit_bias", "max_logit_bias"),
        ({"bad_words": ["a", "b", "c"]}, "bad_words", "max_bad_words"),
        ({"allowed_token_ids": [1, 2, 3, 4]}, "allowed_token_ids", "max_token_ids"),
        ({"stop_token_ids": [1, 2, 3, 4]}, "stop_token_ids", "max_token_ids"),
    ],
)
async def test_limits_of_completions(fields, param, limit):
    rig = Rig(limits=LIMITS)
    response = await ask(rig, **fields)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, param)
    assert error["message"].startswith(f"{param}: ")
    assert str(LIMITS[limit]) in error["message"]
    assert limit in error["message"]
    assert rig.generator.started == 0


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": [{"role": "user", "content": "x"}] * 4}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "x" * 151}] * 2}]}, "messages"),
        ({"n": 5}, "n"),
        ({"max_completion_tokens": 51}, "max_completion_tokens"),
        ({"logprobs": True, "top_logprobs": 6}, "top_logprobs"),
        ({"stop": ["a", "b", "c"]}, "stop"),
    ],
)
async def test_limits_of_chat(fields, param):
    response = await Rig(limits=LIMITS).chat(**fields)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)


async def test_what_is_within_the_limits_passes():
    rig = Rig(says("x" * 100), limits=LIMITS)
    fields = {"n": 4, "stop": ["a" * 10, "b"], "logit_bias": {"1": 1, "2": 1}, "bad_words": ["a", "b"], "logprobs": 5}
    response = await ask(rig, prompt=["x" * 150, "y" * 150], **fields, allowed_token_ids=[1, 120, 3])
    assert response.status_code == 200, response.text
    assert (await rig.chat(n=4, logprobs=True, top_logprobs=5)).status_code == 200


async def test_an_open_length_ends_at_the_limit():
    rig = Rig(says("x" * 100), limits=LIMITS)
    response = await rig.chat()
    assert response.json()["usage"]["completion_tokens"] == 50
    assert response.json()["choices"][0]["finish_reason"] == "length"


async def test_headers_and_values_of_a_body():
    rig = Rig(limits=LIMITS)
    assert code(await rig.post("/v1/completions", {"prompt": "x"}, headers={"x-big": "y" * 2000})) == (
        431,
        "headers_too_large",
    )
    assert code(await ask(rig, prompt=[1] * 1100)) == (413, "payload_too_large")
    assert (await ask(rig, prompt="," * 290)).status_code == 200
    nested = b'{"prompt":"x","chat_template_kwargs":' + b"[" * 300 + b"]" * 300 + b"}"
    async with rig.http() as client:
        deep = await client.post("/v1/completions", content=nested)
    assert (deep.status_code, "recursion limit" in deep.text) == (400, True)


async def test_a_text_that_cannot_fit_is_not_tokenized():
    rig = Rig(max_model_len=100)
    longest = rig.tokenizer.longest_token
    assert longest == len("<end>")
    calls = []
    encode = rig.tokenizer.encode
    rig.tokenizer.encode = lambda *args, **options: (calls.append(args), encode(*args, **options))[1]
    for response in (await ask(rig, prompt="x" * 3000), await rig.chat("x" * 3000)):
        assert code(response) == (400, "context_length_exceeded")
        assert "3000" in response.json()["error"]["message"] or "characters" in response.json()["error"]["message"]
    assert calls == []
    assert (await ask(rig, prompt="x" * 3000, truncate_prompt_tokens=10)).status_code == 200
    assert (await rig.post("/tokenize", {"prompt": "x" * 3000})).json()["count"] == 3000
    assert len(calls) == 2


async def test_a_large_text_does_not_hold_up_a_small_one():
    """The small request is answered while the tokenizer is still at work on the large one."""
    rig = Rig(max_model_len=100_000)
    encode, release = rig.tokenizer.encode, threading.Event()

    def slow(text, *args, **options):
        if len(text) > 5000:
            assert release.wait(20)
        return encode(text, *args, **options)

    rig.tokenizer.encode = slow
    large = asyncio.create_task(ask(rig, prompt="x" * 6000))
    try:
        small = await ask(rig, prompt="Hi")
        assert (small.status_code, large.done()) == (200, False)
    finally:
        release.set()
    assert (await large).status_code == 200
