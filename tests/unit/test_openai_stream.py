"""Server-sent events of both APIs, byte by byte and by meaning."""

import asyncio
import json

import pytest
from openai_harness import END, Rig, events, says
from scripted_generator import Script

from warmroot.cluster.errors import EngineError
from warmroot.cluster.messages import FinishReason, TokenLogprob
from warmroot.router.openai.chat import ChatCompletionChunk
from warmroot.router.openai.chunks import json_text
from warmroot.router.openai.completions import CompletionBody

HEAD = (
    'data: {"id":"chatcmpl-id1","object":"chat.completion.chunk","created":1700000000,"model":"tiny",'
    '"system_fingerprint":"warmroot-0.1.0","choices":['
)


async def test_chat_stream_golden():
    rig = Rig(Script([[72], [105], [END]], cached_tokens=4, replica="r7"))
    answer = await rig.chat(stream=True, stream_options={"include_usage": True})
    assert answer.content.decode() == (
        HEAD + '{"index":0,"delta":{"role":"assistant","content":"","refusal":null},"logprobs":null,'
        '"finish_reason":null}],"usage":null}\n\n'
        + HEAD
        + '{"index":0,"delta":{"content":"H"},"logprobs":null,"finish_reason":null}],"usage":null}\n\n'
        + HEAD
        + '{"index":0,"delta":{"content":"i"},"logprobs":null,"finish_reason":null}],"usage":null}\n\n'
        + HEAD
        + '{"index":0,"delta":{},"logprobs":null,"finish_reason":"stop","stop_reason":null}],"usage":null}\n\n'
        + HEAD
        + '],"usage":{"prompt_tokens":20,"completion_tokens":3,"total_tokens":23,'
        '"prompt_tokens_details":{"cached_tokens":4}}}\n\n'
        "data: [DONE]\n\n"
    )
    headers = answer.headers
    assert headers["content-type"] == "text/event-stream; charset=utf-8"
    assert headers["cache-control"] == "no-cache"
    assert headers["x-request-id"] == "id1"
    assert headers["x-warmroot-replica"] == "r7"
    assert headers["x-warmroot-cached-tokens"] == "4"
    assert int(headers["openai-processing-ms"]) >= 0


async def test_completion_stream_golden():
    rig = Rig(Script([[72], [105, END]]))
    answer = await rig.complete("abc", stream=True)
    head = (
        'data: {"id":"cmpl-id1","object":"text_completion","created":1700000000,"model":"tiny",'
        '"system_fingerprint":"warmroot-0.1.0","choices":[{"index":0,"text":'
    )
    assert answer.content.decode() == (
        head
        + '"H","logprobs":null,"finish_reason":null,"stop_reason":null}]}\n\n'
        + head
        + '"i","logprobs":null,"finish_reason":"stop","stop_reason":null}]}\n\n'
        "data: [DONE]\n\n"
    )


async def test_every_event_has_the_documented_schema():
    options = {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    chat = await Rig().chat(**options, logprobs=True, top_logprobs=1, return_token_ids=True, n=2)
    for event in events(chat.text)[:-1]:
        ChatCompletionChunk.model_validate(event)
    text = await Rig().complete(["a", "b"], **options, logprobs=1, return_token_ids=True, echo=True)
    for event in events(text.text)[:-1]:
        CompletionBody.model_validate(event)


async def test_without_include_usage_there_is_no_usage():
    answer = await Rig().chat(stream=True)
    assert all("usage" not in event for event in events(answer.text)[:-1])


async def test_continuous_usage_counts_up():
    rig = Rig(says("abc"))
    options = {"include_usage": True, "continuous_usage_stats": True}
    answer = await rig.chat(stream=True, stream_options=options)
    totals = [event["usage"]["completion_tokens"] for event in events(answer.text)[:-1]]
    assert totals == [0, 1, 2, 3, 4, 4]


@pytest.mark.parametrize(
    "text", ["héllo wörld", "日本語🎉 flags 🇩🇪", 'tab\tquote" back\\slash\nline', "a\u2028b\u0085c"]
)
async def test_text_arrives_whole_whatever_its_bytes(text):
    answer = await Rig(says(text)).chat(stream=True)
    pieces = [event["choices"][0]["delta"].get("content", "") for event in events(answer.text)[:-1]]
    assert "".join(pieces) == text
    assert "\ufffd" not in answer.text
    assert answer.content.count(b"\n") == 2 * answer.content.count(b"data: ")
    assert len(answer.text.splitlines()) == answer.content.count(b"\n")


def test_json_text_is_json_without_line_ends():
    text = "".join(map(chr, range(0x20))) + '\x7f\x85\u2028\u2029é🎉"\\'
    assert json.loads(json_text(text)) == text
    assert len(json_text(text).splitlines()) == 1


async def test_n_choices_stream_under_their_own_index():
    rig = Rig(lambda request: says("two" if request.request_id.endswith("/1") else "one"))
    got = events((await rig.chat(stream=True, n=2, stream_options={"include_usage": True})).text)
    texts, reasons, roles = {0: "", 1: ""}, {}, []
    for event in got[:-2]:
        (choice,) = event["choices"]
        roles += [choice["index"]] if "role" in choice["delta"] else []
        texts[choice["index"]] += choice["delta"].get("content", "")
        if choice["finish_reason"]:
            reasons[choice["index"]] = choice["finish_reason"]
    assert roles == [0, 1]
    assert texts == {0: "one", 1: "two"}
    assert reasons == {0: "stop", 1: "stop"}
    assert got[-2]["usage"]["completion_tokens"] == 8
    assert got[-2]["usage"]["prompt_tokens"] == 20  # counted once


async def test_several_prompts_stream_as_prompt_times_n_plus_choice():
    rig = Rig(lambda request: says(chr(request.prompt_token_ids[0]) + request.request_id[-2:].replace("-", "/")))
    answer = await rig.complete(["xy", "z"], n=2, stream=True)
    texts: dict[int, str] = {}
    for event in events(answer.text)[:-1]:
        (choice,) = event["choices"]
        texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
    assert texts == {0: "x/0", 1: "x/1", 2: "z/1", 3: "z/1"}


async def test_stop_string_is_reported():
    rig = Rig(says("one END two"))
    got = events((await rig.chat(stream=True, stop="END")).text)
    assert "".join(event["choices"][0]["delta"].get("content", "") for event in got[:-1]) == "one "
    last = got[-2]["choices"][0]
    assert (last["finish_reason"], last["stop_reason"]) == ("stop", "END")
    await rig.idle()


async def test_length_ends_a_stream():
    got = events((await Rig().chat(stream=True, max_completion_tokens=2)).text)
    assert got[-2]["choices"][0]["finish_reason"] == "length"


async def test_logprobs_stream_equals_whole():
    top = ((195, -0.1), (66, -2.0), (67, float("-inf")))
    logprobs = [TokenLogprob(195, -0.1, 1, top), TokenLogprob(169, -0.5, 1, top), TokenLogprob(END, -3.0, 2, top)]
    script = Script([[195], [169], [END]], logprobs=logprobs)
    fields = {"logprobs": True, "top_logprobs": 3}
    whole = (await Rig(script).chat(**fields)).json()["choices"][0]
    assert whole["message"]["content"] == "é"
    content = whole["logprobs"]["content"]
    assert content[0] == {
        "token": "\ufffd",
        "logprob": -0.1,
        "bytes": [195],
        "top_logprobs": [
            {"token": "\ufffd", "logprob": -0.1, "bytes": [195]},
            {"token": "B", "logprob": -2.0, "bytes": [66]},
            {"token": "C", "logprob": -9999.0, "bytes": [67]},
        ],
    }
    assert [entry["token"] for entry in content][2] == "<end>"
    streamed = events((await Rig(script).chat(**fields, stream=True)).text)
    pieces = [event["choices"][0]["logprobs"] for event in streamed[:-1]]
    assert [entry for piece in pieces if piece for entry in piece["content"]] == content


async def test_completion_logprobs_with_echo():
    prompt_logprobs = [None, TokenLogprob(98, -1.5, 1, ((98, -1.5),))]
    script = Script([[99], [END]], prompt_logprobs=prompt_logprobs)
    whole = (await Rig(script).complete("ab", echo=True, logprobs=1)).json()["choices"][0]
    assert whole["text"] == "abc"
    assert whole["logprobs"] == {
        "tokens": ["a", "b", "c", "<end>"],
        "token_logprobs": [None, -1.5, -1.0, -1.0],
        "top_logprobs": [None, {"b": -1.5}, {"c": -1.0}, {"<end>": -1.0}],
        "text_offset": [0, 1, 2, 3],
    }
    rig = Rig(script)
    streamed = [
        event["choices"][0]
        for event in events((await rig.complete("ab", echo=True, logprobs=1, stream=True)).text)[:-1]
    ]
    assert rig.generator.requests[0].params.prompt_logprobs == 1
    assert "".join(choice["text"] for choice in streamed) == "abc"
    for key, value in whole["logprobs"].items():
        assert [entry for choice in streamed for entry in choice["logprobs"][key]] == value


async def test_tokens_as_token_ids():
    choice = (await Rig(says("a")).complete(logprobs=0, return_tokens_as_token_ids=True)).json()["choices"][0]
    assert choice["logprobs"]["tokens"] == ["token_id:97", "token_id:256"]


async def test_return_token_ids():
    got = events((await Rig(says("ab")).complete([120, 121], stream=True, return_token_ids=True)).text)
    choices = [event["choices"][0] for event in got[:-1]]
    assert [choice["token_ids"] for choice in choices] == [[97], [98], [END]]
    assert [choice.get("prompt_token_ids") for choice in choices] == [[120, 121], None, None]
    chat = events((await Rig(says("ab")).chat("x", stream=True, return_token_ids=True)).text)
    assert chat[0]["prompt_token_ids"] == list(b"<user>x\n<assistant>")
    assert [event["choices"][0].get("token_ids") for event in chat[1:4]] == [[97], [98], [END]]


@pytest.mark.parametrize("include_usage", [False, True])
async def test_error_after_the_start_is_an_event_and_the_end(include_usage):
    rig = Rig(Script([[72]], error=EngineError("the replica is gone")))
    answer = await rig.chat(stream=True, stream_options={"include_usage": include_usage})
    assert answer.status_code == 200
    assert events(answer.text)[-1] == {
        "error": {"message": "the replica is gone", "type": "server_error", "param": None, "code": "engine_error"}
    }
    assert "[DONE]" not in answer.text


async def test_a_bug_after_the_start_tells_only_its_request():
    answer = await Rig(Script([[72]], error=RuntimeError("secret detail"))).chat(stream=True)
    assert events(answer.text)[-1]["error"]["message"] == "internal error (request id1)"
    assert "secret" not in answer.text


async def test_one_failing_prompt_ends_the_stream_and_closes_the_others():
    def script(request):
        if request.prompt_token_ids == [98]:
            return Script([[72], [73]], error=EngineError("gone"), delay=0.001)
        return Script([[72]], forever=True, delay=0.001)

    rig = Rig(script)
    answer = await rig.complete([[97], [98]], stream=True, max_tokens=400)
    assert events(answer.text)[-1]["error"]["message"] == "gone"
    assert (rig.generator.live, rig.generator.failed, rig.generator.aborted) == (0, 1, 1)


async def test_deltas_that_wait_are_written_together():
    rig = Rig(Script([[97]] * 50, finish_reason=FinishReason.LENGTH))
    sent: list[bytes] = []
    body = json.dumps({"prompt": "x", "stream": True, "max_tokens": 50}).encode()
    pending = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive():
        if pending:
            return pending.pop()
        await asyncio.Event().wait()

    async def send(message):
        sent.append(message.get("body", b""))

    scope = {
        "type": "http",
        "method": "POST",
        "path": "/v1/completions",
        "query_string": b"",
        "headers": [(b"content-type", b"application/json")],
    }
    await rig.app(scope, receive, send)
    assert b"".join(sent).count(b"data: ") == 51
    assert len(sent) <= 4


async def test_keep_alive_comment_in_a_silence():
    rig = Rig(Script([[97], [98]], delay=0.15), keep_alive_s=0.02)
    answer = await rig.chat(stream=True)
    assert ": keep-alive\n\n" in answer.text
    assert answer.text.index("data: ") < answer.text.index(": keep-alive")  # never before the first delta
    assert answer.text.endswith("data: [DONE]\n\n")
