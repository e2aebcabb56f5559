"""The API of a real cluster, over HTTP: two replicas behind Serve's HAProxy."""

import asyncio
import json
from typing import Any

import httpx
import pytest

import warmroot
from warmroot.deploy.app import replica_handle

from .cluster_harness import Cluster

pytestmark = [pytest.mark.cluster, pytest.mark.model]

PROMPT = "The capital of France is"
GREEDY = {"model": "smollm2", "prompt": PROMPT, "max_tokens": 12, "temperature": 0}
CHAT = {
    "model": "smollm2",
    "messages": [{"role": "user", "content": "Name three colours."}],
    "max_tokens": 12,
    "temperature": 0,
}


def complete(client: httpx.Client, **fields: Any) -> dict[str, Any]:
    return post(client, "/v1/completions", **(GREEDY | fields)).json()


def post(client: httpx.Client, path: str, **body: Any) -> httpx.Response:
    response = client.post(path, json=body)
    assert response.status_code == 200, response.text
    return response


def events(client: httpx.Client, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The chunks of a stream that ends with [DONE]."""
    with client.stream("POST", path, json=body | {"stream": True}) as response:
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/event-stream")
        data = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    assert data[-1] == "[DONE]"
    return [json.loads(text) for text in data[:-1]]


def test_completion(client: httpx.Client):
    body = complete(client)
    choice = body["choices"][0]
    assert choice["text"].startswith(" Paris")
    assert choice["finish_reason"] == "length"
    assert (body["object"], body["model"]) == ("text_completion", "smollm2")
    usage = body["usage"]
    assert len(usage.pop("weights_versions")) == 1
    assert usage | {"prompt_tokens_details": None} == {
        "prompt_tokens": 5,
        "completion_tokens": 12,
        "total_tokens": 17,
        "prompt_tokens_details": None,
    }


def test_chat(client: httpx.Client):
    body = post(client, "/v1/chat/completions", **CHAT).json()
    message = body["choices"][0]["message"]
    assert message["role"] == "assistant"
    assert message["content"].strip()
    assert body["object"] == "chat.completion"


@pytest.mark.parametrize("body", [CHAT, CHAT | {"n": 2, "temperature": 1, "seed": 5}], ids=["greedy", "two choices"])
def test_a_chat_stream_says_what_the_whole_answer_says(client: httpx.Client, body: dict[str, Any]):
    whole = post(client, "/v1/chat/completions", **body).json()
    chunks = events(client, "/v1/chat/completions", body | {"stream_options": {"include_usage": True}})
    texts = dict.fromkeys(range(body.get("n", 1)), "")
    for choice in (choice for chunk in chunks for choice in chunk["choices"]):
        texts[choice["index"]] += choice["delta"].get("content") or ""
    assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"
    assert texts == {choice["index"]: choice["message"]["content"] for choice in whole["choices"]}
    assert chunks[-1]["choices"] == []
    assert counts(chunks[-1]) == counts(whole)


def test_a_completion_stream_says_what_the_whole_answer_says(client: httpx.Client):
    whole = complete(client)
    chunks = events(client, "/v1/completions", GREEDY | {"stream_options": {"include_usage": True}})
    assert "".join(choice["text"] for chunk in chunks for choice in chunk["choices"]) == whole["choices"][0]["text"]
    assert counts(chunks[-1]) == counts(whole)


def counts(body: dict[str, Any]) -> tuple[int, int, int]:
    usage = body["usage"]
    return usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]


def test_n_choices_are_drawn_apart(client: httpx.Client):
    choices = complete(client, n=2, temperature=1, seed=11)["choices"]
    assert [choice["index"] for choice in choices] == [0, 1]
    assert choices[0]["text"] != choices[1]["text"]


def test_a_seed_repeats_its_draws(client: httpx.Client):
    drawn = {complete(client, temperature=1, seed=seed)["choices"][0]["text"] for seed in (3, 3, 3)}
    assert len(drawn) == 1
    assert complete(client, temperature=1, seed=4)["choices"][0]["text"] not in drawn


def test_a_stop_string_is_found_across_tokens(client: httpx.Client):
    tokens = [entry["token"] for entry in logprob_content(client)]
    # From the middle of the second token to the middle of the fourth.
    stop = tokens[1][1:] + tokens[2] + tokens[3][:1]
    text = "".join(tokens)
    response = post(client, "/v1/chat/completions", **(CHAT | {"stop": [stop]})).json()["choices"][0]
    assert response["finish_reason"] == "stop"
    assert response["message"]["content"] == text[: text.index(stop)]
    chunks = events(client, "/v1/chat/completions", CHAT | {"stop": [stop]})
    streamed = "".join(choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"])
    assert streamed == text[: text.index(stop)]


def test_chat_logprobs(client: httpx.Client):
    for entry in logprob_content(client):
        assert len(entry["top_logprobs"]) == 2
        assert entry["top_logprobs"][0]["logprob"] == entry["logprob"] <= 0  # greedy: the likeliest
        assert bytes(entry["bytes"]).decode() == entry["token"]


def logprob_content(client: httpx.Client) -> list[dict[str, Any]]:
    body = post(client, "/v1/chat/completions", **CHAT, logprobs=True, top_logprobs=2).json()
    return body["choices"][0]["logprobs"]["content"]


def test_echo_and_prompt_logprobs(client: httpx.Client):
    plain = complete(client)["choices"][0]["text"]
    choice = complete(client, echo=True, logprobs=1, prompt_logprobs=1)["choices"][0]
    assert choice["text"] == PROMPT + plain
    logprobs = choice["logprobs"]
    assert "".join(logprobs["tokens"]) == choice["text"]
    assert logprobs["token_logprobs"][0] is None
    assert all(value <= 0 for value in logprobs["token_logprobs"][1:])
    assert len(choice["prompt_logprobs"]) == 5
    assert choice["prompt_logprobs"][0] is None


def test_the_next_turn_finds_the_last_one_in_the_same_replica(client: httpx.Client):
    history = [
        {"role": "system", "content": "You are a patient teacher of history who answers in short sentences."},
        {"role": "user", "content": "Who built the first telescope, and when was it that he built it?"},
    ]
    first = post(client, "/v1/chat/completions", **(CHAT | {"messages": history, "max_tokens": 24}))
    answer = first.json()["choices"][0]["message"]
    history += [{"role": "assistant", "content": answer["content"]}, {"role": "user", "content": "And what for?"}]
    second = post(client, "/v1/chat/completions", **(CHAT | {"messages": history}))
    cached = second.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    # All of the first turn but its last, partly filled block.
    assert cached >= first.json()["usage"]["total_tokens"] - 16
    assert second.headers["x-warmroot-cached-tokens"] == str(cached)
    assert second.headers["x-warmroot-replica"] == first.headers["x-warmroot-replica"]


async def test_every_way_in_gives_the_same_greedy_answer(cluster: Cluster, client: httpx.Client):
    expected = complete(client, return_token_ids=True)["choices"][0]["token_ids"]
    params = warmroot.SamplingParams(max_tokens=12, temperature=0)
    output = await cluster.handle.generate(PROMPT, params)
    assert output.completions[0].token_ids == expected
    assert [
        token for delta in await plain_call(output.prompt_token_ids, 12) for token in delta["token_ids"]
    ] == expected


async def test_plain_serve_handles_find_the_warm_replica(cluster: Cluster):
    streak = 0
    for number in range(100):
        # The router of a new handle begins to follow the bus with its first request.
        warm = await cluster.handle.generate(f"{number} sentences. " * 12, warmroot.SamplingParams(max_tokens=1))
        prompt = warm.prompt_token_ids
        found = (await plain_call(prompt, 1))[0]["cached_tokens"] >= len(prompt) - 16
        streak = streak + 1 if found else 0
        if streak == 8:
            return
        await asyncio.sleep(0.1)
    raise AssertionError("plain handles do not follow the cache")


async def test_plain_serve_handles_keep_salts_apart(cluster: Cluster):
    """The router looks for a prompt under its salt, so the engine must too."""
    warm = await cluster.handle.generate("Salt and sentences. " * 12, warmroot.SamplingParams(max_tokens=1))
    prompt = warm.prompt_token_ids
    for number in range(8):
        assert (await plain_call(prompt, 1, cache_salt=f"salt {number}"))[0]["cached_tokens"] == 0


async def plain_call(prompt_token_ids: list[int], max_tokens: int, **fields: Any) -> list[dict[str, Any]]:
    params = {"max_tokens": max_tokens, "temperature": 0}
    request = {"prompt_token_ids": prompt_token_ids, "params": params, **fields}
    return [delta async for delta in replica_handle().options(stream=True).generate.remote(request)]


def test_models(client: httpx.Client):
    assert [model["id"] for model in client.get("/v1/models").json()["data"]] == ["smollm2"]
    assert client.get("/v1/models/smollm2").json()["max_model_len"] == 1024
    assert client.get("/v1/models/gpt-9").status_code == 404


def test_tokens_and_back(client: httpx.Client):
    text = "Füße, 東京 and 🙂"
    tokens = post(client, "/tokenize", prompt=text).json()
    assert tokens["count"] == len(tokens["tokens"]) > 0
    assert post(client, "/detokenize", tokens=tokens["tokens"]).json() == {"prompt": text}
    rendered = post(client, "/tokenize", messages=CHAT["messages"]).json()["tokens"]
    usage = post(client, "/v1/chat/completions", **CHAT).json()["usage"]
    assert usage["prompt_tokens"] == len(rendered)


@pytest.mark.parametrize("path", ["/health", "/livez", "/readyz", "/ping"])
def test_probes(client: httpx.Client, path: str):
    assert client.get(path).status_code == 200


def test_status_pages(client: httpx.Client):
    assert client.get("/version").json() == {"version": warmroot.__version__}
    load = client.get("/load").json()
    assert [replica["state"] for replica in load["replicas"]] == ["ready", "ready"]
    metrics = client.get("/metrics").text
    assert 'vllm:num_requests_running{engine="' in metrics
    assert "vllm:generation_tokens_total{" in metrics
    assert "warmroot:" in metrics


def test_request_ids_come_back(client: httpx.Client):
    response = client.post("/v1/completions", json=GREEDY, headers={"x-request-id": "mine-1"})
    assert response.headers.get_list("x-request-id") == ["mine-1"]
    assert "mine-1" in response.json()["id"]


@pytest.mark.parametrize(
    ("path", "body", "status", "param", "code"),
    [
        ("/v1/completions", b"{", 400, None, None),
        ("/v1/completions", b"[]", 400, None, None),
        ("/v1/completions", GREEDY | {"temperature": -1}, 400, "temperature", None),
        ("/v1/completions", GREEDY | {"max_tokens": "many"}, 400, "max_tokens", None),
        ("/v1/completions", GREEDY | {"prompt": "word " * 3000}, 400, None, "context_length_exceeded"),
        ("/v1/completions", GREEDY | {"model": "gpt-9"}, 404, "model", "model_not_found"),
        ("/v1/completions", GREEDY | {"prompt": "word " * 100_000}, 413, None, "payload_too_large"),
        ("/v1/chat/completions", CHAT | {"messages": []}, 400, "messages", None),
        ("/v1/nothing", {}, 404, None, "not_found"),
    ],
)
def test_mistakes(client: httpx.Client, path: str, body: Any, status: int, param: str | None, code: str | None):
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    response = client.post(path, content=content, headers={"content-type": "application/json"})
    error = response.json()["error"]
    assert response.status_code == status
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] == code
    if param is not None:
        assert error["param"] == param
