"""Whole responses, the fields that reach the sampler, and the small endpoints."""

import pytest
from openai_harness import END, Rig, byte_tokenizer, events, says
from prometheus_client.parser import text_string_to_metric_families
from scripted_generator import Script

from warmroot.cluster.errors import EngineError
from warmroot.cluster.messages import FinishReason, TokenLogprob
from warmroot.cluster.sampling_params import SamplingParams
from warmroot.router.openai.chat import ChatCompletion
from warmroot.router.openai.cluster_state import RoutingStats
from warmroot.router.openai.completions import CompletionBody


async def test_chat_completion():
    response = await Rig().chat()
    assert response.json() == {
        "id": "chatcmpl-id1",
        "object": "chat.completion",
        "created": 1700000000,
        "model": "tiny",
        "system_fingerprint": "warmroot-0.1.0",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "Hello!", "refusal": None},
                "logprobs": None,
                "finish_reason": "stop",
                "stop_reason": None,
            }
        ],
        "usage": {
            "prompt_tokens": 20,
            "completion_tokens": 7,
            "total_tokens": 27,
            "prompt_tokens_details": {"cached_tokens": 4},
        },
    }
    assert response.headers["x-warmroot-replica"] == "r0"
    assert response.headers["x-warmroot-cached-tokens"] == "4"
    assert response.headers["content-type"] == "application/json"


async def test_whole_responses_have_the_documented_schema():
    fields = {"n": 2, "return_token_ids": True, "prompt_logprobs": 1}
    chat = await Rig().chat(**fields, logprobs=True, top_logprobs=2)
    ChatCompletion.model_validate(chat.json(), strict=True)
    text = await Rig().complete(["a", "b"], **fields, logprobs=2, echo=True)
    CompletionBody.model_validate(text.json(), strict=True)


@pytest.mark.parametrize("fields", [{}, {"n": 3}, {"stop": "l"}, {"max_tokens": 2}, {"logprobs": True}])
async def test_usage_and_text_are_the_same_streamed_or_not(fields):
    whole = (await Rig().chat(**fields)).json()
    streamed = events((await Rig().chat(**fields, stream=True, stream_options={"include_usage": True})).text)
    assert streamed[-2]["usage"] == whole["usage"]
    for choice in whole["choices"]:
        mine = [c for event in streamed[:-2] for c in event["choices"] if c["index"] == choice["index"]]
        assert "".join(c["delta"].get("content", "") for c in mine) == choice["message"]["content"]
        assert mine[-1]["finish_reason"] == choice["finish_reason"]
        assert mine[-1]["stop_reason"] == choice["stop_reason"]


async def test_several_prompts():
    rig = Rig(lambda request: says(bytes(request.prompt_token_ids).decode().upper(), cached_tokens=1))
    answer = (await rig.complete(["ab", "c"], n=2)).json()
    assert [(c["index"], c["text"]) for c in answer["choices"]] == [(0, "AB"), (1, "AB"), (2, "C"), (3, "C")]
    assert answer["usage"]["prompt_tokens"] == 3
    assert answer["usage"]["completion_tokens"] == 2 * 3 + 2 * 2
    assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": 2}


@pytest.mark.parametrize("prompt", ["ab", ["ab"], [97, 98], [[97, 98]]])
async def test_forms_of_a_prompt(prompt):
    rig = Rig()
    answer = (await rig.complete(prompt, echo=True)).json()
    assert answer["choices"][0]["text"] == "abHello!"
    assert [request.prompt_token_ids for request in rig.generator.requests] == [[97, 98]]


async def test_echo_alone_scores_the_prompt():
    prompt_logprobs = [None, TokenLogprob(98, -1.5, 1, ())]
    rig = Rig(Script([[97]], finish_reason=FinishReason.LENGTH, prompt_logprobs=prompt_logprobs))
    answer = (await rig.complete("ab", echo=True, logprobs=0, max_tokens=0)).json()
    (choice,) = answer["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("ab", "length")
    assert choice["logprobs"]["token_logprobs"] == [None, -1.5]
    assert answer["usage"]["completion_tokens"] == 0


async def test_prompt_logprobs_as_vllm_writes_them():
    prompt_logprobs = [None, TokenLogprob(98, -1.5, 2, ((97, -0.5), (98, -1.5)))]
    body = (await Rig(says("x", prompt_logprobs=prompt_logprobs)).complete("ab", prompt_logprobs=2)).json()
    assert body["choices"][0]["prompt_logprobs"] == [
        None,
        {
            "98": {"logprob": -1.5, "rank": 2, "decoded_token": "b"},
            "97": {"logprob": -0.5, "rank": 1, "decoded_token": "a"},
        },
    ]


async def test_best_of_returns_the_likeliest_and_counts_all():
    scores = {"0": -2.0, "1": -0.5, "2": -1.0}

    def script(request):
        number = request.request_id.partition("/")[2] or "0"
        return Script([[ord(number)], [END]], logprobs=[TokenLogprob(ord(number), scores[number], 1)] * 2)

    body = (await Rig(script).complete("x", n=2, best_of=3)).json()
    assert [(choice["index"], choice["text"]) for choice in body["choices"]] == [(0, "1"), (1, "2")]
    assert body["choices"][0]["logprobs"] is None
    assert body["usage"]["completion_tokens"] == 6


async def test_every_field_reaches_the_sampler():
    rig = Rig()
    fields = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 40,
        "min_p": 0.1,
        "presence_penalty": 0.2,
        "frequency_penalty": 0.3,
        "repetition_penalty": 1.1,
        "logit_bias": {"65": 5, "66": -5.5},
        "allowed_token_ids": [65, 66],
        "seed": 11,
        "stop_token_ids": [67],
        "include_stop_str_in_output": True,
        "min_tokens": 1,
        "ignore_eos": True,
        "skip_special_tokens": False,
        "speculative": False,
        "max_tokens": 9,
        "max_completion_tokens": 5,
        "logprobs": True,
        "top_logprobs": 3,
        "priority": -2,
        "cache_salt": "mine",
    }
    assert (await rig.chat(**fields)).status_code == 200
    (request,) = rig.generator.requests
    assert request.params == SamplingParams(
        temperature=0.5,
        top_p=0.9,
        top_k=40,
        min_p=0.1,
        presence_penalty=0.2,
        frequency_penalty=0.3,
        repetition_penalty=1.1,
        logit_bias={65: 5, 66: -5.5},
        allowed_token_ids=(65, 66),
        seed=11,
        stop_token_ids=(67,),
        include_stop_str_in_output=True,
        min_tokens=1,
        ignore_eos=True,
        skip_special_tokens=False,
        speculative=False,
        max_tokens=5,
        logprobs=3,
    )
    assert request.priority == -2


async def test_defaults():
    rig = Rig()
    await rig.chat()
    await rig.complete()
    chat, text = rig.generator.requests
    assert chat.params == SamplingParams(max_tokens=512 - 20, seed=7)
    assert text.params == SamplingParams(max_tokens=16, seed=7)
    assert (chat.priority, chat.cache_salt) == (0, "")


async def test_messages_become_the_templates_prompt():
    async def prompt(messages, **fields):
        rig = Rig()
        assert (await rig.chat(messages=messages, **fields)).status_code == 200
        return bytes(rig.generator.requests[0].prompt_token_ids).decode()

    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    messages = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": parts}]
    assert await prompt(messages) == "<system>Be brief.\n<user>one\ntwo\n<assistant>"
    assert await prompt(messages, add_generation_prompt=False) == "<system>Be brief.\n<user>one\ntwo"
    opened = [*messages, {"role": "assistant", "content": "Once"}]
    assert (await prompt(opened, continue_final_message=True)).endswith("<assistant>Once")


async def test_truncation():
    async def kept(**fields):
        rig = Rig(max_model_len=23)
        assert (await rig.complete("abcdef", **fields)).status_code == 200
        return bytes(rig.generator.requests[0].prompt_token_ids)

    assert await kept(truncate_prompt_tokens=2) == b"ef"
    assert await kept(truncate_prompt_tokens=2, truncation_side="right") == b"ab"
    assert await kept(truncate_prompt_tokens=9) == b"abcdef"
    assert await kept(truncate_prompt_tokens=-1, max_tokens=20) == b"def"


async def test_models():
    async with Rig().http() as client:
        listed = (await client.get("/v1/models")).json()
        one = (await client.get("/v1/models/alias")).json()
        missing = await client.get("/v1/models/org/else")
    assert listed["object"] == "list"
    assert [card["id"] for card in listed["data"]] == ["tiny", "alias"]
    assert one == {
        "id": "alias",
        "object": "model",
        "created": 1700000000,
        "owned_by": "warmroot",
        "root": "org/tiny",
        "max_model_len": 512,
        "weights_versions": [],
    }
    assert missing.status_code == 404


async def test_tokenize_and_detokenize():
    rig = Rig()
    text = await rig.post("/tokenize", {"prompt": "hé", "return_token_strs": True})
    expected = {"count": 3, "max_model_len": 512, "tokens": [104, 195, 169], "token_strs": ["h", "\ufffd", "\ufffd"]}
    assert text.json() == expected
    chat = await rig.post("/tokenize", {"messages": [{"role": "user", "content": "x"}]})
    assert bytes(chat.json()["tokens"]) == b"<user>x\n<assistant>"
    assert (await rig.post("/detokenize", {"tokens": [104, 195, 169, END]})).json() == {"prompt": "hé<end>"}
    for path, body, param in (
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens.0"),
        ("/detokenize", {"tokens": [257]}, "tokens"),
        ("/detokenize", {"tokens": "abc"}, "tokens"),
    ):
        response = await rig.post(path, body)
        assert (response.status_code, response.json()["error"]["param"]) == (400, param)


async def test_version_load_and_documentation():
    async with Rig().http() as client:
        assert (await client.get("/version")).json() == {"version": "0.1.0"}
        load = (await client.get("/load")).json()
        assert load["server_load"] == 5
        assert load["replicas"][0]["kv_cache_usage"] == 0.25
        state = (await client.get("/admin/state")).json()
        store = state["metadata_store"]
        known = {"index_blocks": 12, "gaps": 3, "skipped": 1, "conflicts": 0, "resyncs": 0, "silent": 0}
        lag = {"lag_p50_s": None, "lag_p95_s": None}
        assert store == {"store": "redis://h:6379/0", "fault": "", **known, **lag}
        assert (state["ready"], state["server_load"], state["models"][0]) == (True, 5, "tiny")
        assert state["replicas"][0]["epoch"] == 1
        assert state["replicas"][0]["ranks"] == []
        assert "swagger" in (await client.get("/docs")).text.lower()
        schema = (await client.get("/openapi.json")).json()
    fields = schema["components"]["schemas"]["ChatCompletionRequest"]["properties"]
    assert all(field.get("description") for name, field in fields.items())
    operation = schema["paths"]["/v1/chat/completions"]["post"]
    assert {"200", "400", "401", "404", "413", "429", "503"} <= set(operation["responses"])
    references = set(_references(schema))
    assert references <= {f"#/components/schemas/{name}" for name in schema["components"]["schemas"]}


def _references(node):
    if isinstance(node, dict):
        if "$ref" in node:
            yield node["$ref"]
        node = list(node.values())
    if isinstance(node, list):
        for child in node:
            yield from _references(child)


async def test_metrics():
    rig = Rig()
    rig.cluster.stats = RoutingStats(
        decisions={("cost", "warm"): 3, ("cost", "idle"): 1},
        predicted_hit_tokens=30,
        actual_hit_tokens=28,
        best_hit_tokens=40,
    )
    await rig.chat(n=2)
    await rig.complete("abc", stream=True, max_tokens=2)
    async with rig.http() as client:
        response = await client.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=")
    samples = {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(response.text)
        for sample in family.samples
    }
    labels = (("engine", "r0"), ("model_name", "org/tiny"))

    def value(name, *extra):
        return samples[name, tuple(sorted((*labels, *extra)))]

    assert value("vllm:prompt_tokens_total") == 20 + 3
    assert value("vllm:prompt_tokens_cached_total") == 8
    assert value("vllm:prefix_cache_queries_total") == 23
    assert value("vllm:prefix_cache_hits_total") == 8
    assert value("vllm:generation_tokens_total") == 2 * 7 + 2
    assert value("vllm:request_success_total", ("finished_reason", "stop")) == 2
    assert value("vllm:request_success_total", ("finished_reason", "length")) == 1
    assert value("vllm:time_to_first_token_seconds_count") == 2
    assert value("vllm:inter_token_latency_seconds_count") == 2 * 6 + 1
    assert value("vllm:e2e_request_latency_seconds_count") == 3
    assert value("vllm:num_requests_running") == 3
    assert value("vllm:num_requests_waiting") == 2
    assert value("vllm:kv_cache_usage_perc") == 0.25
    assert value("vllm:spec_decode_num_drafts_total") == 5
    assert value("vllm:spec_decode_num_draft_tokens_total") == 19
    assert value("vllm:spec_decode_num_accepted_tokens_total") == 7
    assert value("vllm:spec_decode_num_accepted_tokens_per_pos_total", ("position", "1")) == 3
    cache = (("block_size", "16"), ("num_gpu_blocks", "100"), ("cache_dtype", "bf16"))
    assert value("vllm:cache_config_info", *cache) == 1
    assert samples["warmroot:routing_decisions_total", (("policy", "cost"), ("reason", "warm"))] == 3
    assert samples["warmroot:predicted_hit_tokens_total", ()] == 30
    assert samples["warmroot:actual_hit_tokens_total", ()] == 28
    assert samples["warmroot:best_hit_tokens_total", ()] == 40
    assert samples["warmroot:replicas", (("model_name", "org/tiny"), ("state", "ready"))] == 1
    assert samples["warmroot:metadata_store_up", ()] == 1
    assert samples["warmroot:index_blocks", ()] == 12
    assert samples["warmroot:index_gaps_total", ()] == 3
    assert samples["warmroot:index_skipped_batches_total", ()] == 1


async def test_metrics_of_failures():
    rig = Rig(Script([[97]], error=EngineError("gone")))
    await rig.chat()
    await rig.chat(stream=True)
    async with rig.http() as client:
        text = (await client.get("/metrics")).text
    labels = 'engine="r0",finished_reason="error",model_name="org/tiny"'
    assert f"vllm:request_success_total{{{labels}}} 2.0" in text


async def test_two_applications_do_not_share_metrics():
    first, second = Rig(), Rig()
    await first.chat()
    async with second.http() as client:
        assert "vllm:generation_tokens_total{" not in (await client.get("/metrics")).text


def test_the_byte_tokenizer_is_what_the_tests_take_it_for():
    tokenizer = byte_tokenizer()
    assert tokenizer.encode("é<end>") == [195, 169, END]
    assert (tokenizer.vocab_size, tokenizer.eos_token_id) == (257, END)
