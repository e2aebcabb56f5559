"""``/v1/responses`` over a scripted generator: input, output, events and their order, with OpenAI's own client."""

import json

import openai
import pytest
from openai_harness import Rig, says
from scripted_generator import Script

from warmroot.cluster.errors import EngineError
from warmroot.cluster.messages import FinishReason
from warmroot.cluster.output_grammar import OutputGrammar
from warmroot.router.openai.response_schema import ResponseObject

ROOM = 4096
WEATHER = {
    "type": "function",
    "name": "weather",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
CALL = 'Let me see.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'


def rig(text: str = "Hello!", size: int = 2) -> Rig:
    return Rig(says(text, size=size, cached_tokens=4), max_model_len=ROOM)


async def respond(one: Rig, given="Hi", **fields):
    return await one.post("/v1/responses", {"model": "tiny", "input": given, **fields})


async def prompt_of(given, **fields) -> str:
    one = rig()
    response = await respond(one, given, **fields)
    assert response.status_code == 200, response.text
    return one.tokenizer.decode(one.generator.requests[0].prompt_token_ids)


async def test_a_whole_response():
    response = await respond(rig(), metadata={"a": "b"}, temperature=0)
    body = response.json()
    ResponseObject.model_validate(body, strict=True)
    assert body["id"].startswith("resp_")
    assert (body["object"], body["status"], body["store"]) == ("response", "completed", False)
    assert body["metadata"] == {"a": "b"}
    assert body["temperature"] == 0
    [item] = body["output"]
    assert item["type"] == "message"
    assert item["content"][0]["text"] == "Hello!"
    usage = body["usage"]
    assert usage["input_tokens_details"] == {"cached_tokens": 4}
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"] == usage["input_tokens"] + 7


async def test_cut_at_its_length():
    body = (await respond(rig(), max_output_tokens=3)).json()
    assert body["status"] == body["output"][0]["status"] == "incomplete"
    assert body["incomplete_details"] == {"reason": "max_output_tokens"}


async def test_input():
    assert await prompt_of("Hi", instructions="Be kind.") == "<system>Be kind.\n<user>Hi\n<assistant>"
    items = [
        {"role": "developer", "content": "Short."},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Weather?"}]},
        {"type": "reasoning", "id": "rs_1", "summary": []},
        {
            "type": "message",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "I ask.", "annotations": []}],
        },
        {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": '{"city": "Rome"}'},
        {"type": "function_call_output", "call_id": "c1", "output": "sunny"},
    ]
    assert await prompt_of(items) == (
        "<system>Short.\n<user>Weather?\n"
        '<assistant>I ask.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>\n'
        "<user><tool_response>\nsunny\n</tool_response>\n<assistant>"
    )


async def test_text_format():
    one = rig()
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    form = {"type": "json_schema", "name": "x", "schema": schema, "strict": True}
    body = (await respond(one, text={"format": form})).json()
    assert one.generator.requests[0].params.grammar == OutputGrammar.json_schema(schema)
    assert body["text"]["format"]["schema"] == schema


async def test_calls():
    [message, call] = (await respond(rig(CALL), tools=[WEATHER])).json()["output"]
    assert message["content"][0]["text"] == "Let me see."
    assert (call["type"], call["name"], call["arguments"]) == ("function_call", "weather", '{"city": "Rome"}')
    assert call["call_id"].startswith("call_")


def allowed(mode: str, *names: str) -> dict:
    return {"type": "allowed_tools", "mode": mode, "tools": [{"type": "function", "name": name} for name in names]}


def schema_format(properties: dict) -> dict:
    return {"type": "json_schema", "name": "x", "schema": {"type": "object", "properties": properties}}


async def test_some_of_the_tools():
    one = rig()
    response = await respond(one, tools=[WEATHER, {**WEATHER, "name": "f"}], tool_choice=allowed("required", "weather"))
    assert response.json()["tool_choice"] == allowed("required", "weather")
    [request] = one.generator.requests
    assert '"const": "weather"' in request.params.grammar.text
    assert '"const": "f"' not in request.params.grammar.text


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "c"}, "conversation"),
        ({"background": True}, "background"),
        ({"prompt": {"id": "pmpt_1"}}, "prompt"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"include": ["message.output_text.logprobs"]}, "include"),
        ({"tools": [WEATHER], "tool_choice": allowed("auto", "weather", "f")}, "tool_choice.tools.1.name"),
        ({"tools": [WEATHER], "tool_choice": allowed("maybe", "weather")}, "tool_choice.mode"),
        ({"text": {"format": schema_format({"function": {"type": 1}})}}, "text.format.schema.properties.function.type"),
        ({"input": []}, "input"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input.0"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input.0.content.0.type"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_output_tokens": 9999}, "max_output_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"input": "x" * 5000}, "input"),
        ({"text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": 1}}}}, "text.format.schema.type"),
        ({"tools": [WEATHER], "tool_choice": {"type": "function", "name": "f"}}, "tool_choice.name"),
        ({"tools": [{**WEATHER, "parameters": {"type": 1}}], "tool_choice": "required"}, "tools.0.parameters.type"),
        ({"tools": [{"type": "web_search"}]}, "tools.0.type"),
        ({"priority": 2**40}, "priority"),
    ],
)
async def test_refusals(fields, param):
    one = rig()
    response = await one.post("/v1/responses", {"model": "tiny", "input": "Hi", **fields})
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param
    assert not one.generator.requests


def events_of(text: str) -> list[dict]:
    """The data of each event, whose name is its type."""
    found = []
    for block in text.split("\n\n")[:-1]:
        name, data = block.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


async def test_events_in_their_order():
    found = events_of((await respond(rig(CALL, size=9), tools=[WEATHER], stream=True)).text)
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    kinds = [event["type"].removeprefix("response.") for event in found]
    assert list(dict.fromkeys(kinds)) == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "completed",
    ]
    assert "".join(e["delta"] for e in found if e["type"].endswith("text.delta")) == "Let me see."
    assert "".join(e["delta"] for e in found if e["type"].endswith("arguments.delta")) == '{"city": "Rome"}'
    added = [e["item"]["type"] for e in found if e["type"].endswith("item.added")]
    assert added == ["message", "function_call"]
    assert found[0]["response"]["output"] == []
    assert found[-1]["response"]["usage"]["output_tokens"] == len(CALL) + 1


@pytest.mark.parametrize("text", ["Hello!", CALL])
async def test_a_stream_ends_with_the_whole_response(text):
    whole = (await respond(rig(text), tools=[WEATHER])).json()
    last = events_of((await respond(rig(text), tools=[WEATHER], stream=True)).text)[-1]["response"]

    def without_ids(body: dict) -> dict:
        items = [{k: v for k, v in item.items() if k not in ("id", "call_id")} for item in body["output"]]
        return {**body, "output": items}

    assert without_ids(last) == without_ids(whole)


async def test_cut_streams_say_so():
    last = events_of((await respond(rig(), stream=True, max_output_tokens=3)).text)[-1]
    assert last["type"] == "response.incomplete"


async def test_errors_in_a_stream_are_events():
    one = Rig(Script([[72], [73]], error=EngineError("the engine failed")))
    last = events_of((await respond(one, stream=True)).text)[-1]
    assert (last["type"], last["code"], last["message"]) == ("error", "engine_error", "the engine failed")


async def test_the_official_client():
    one = rig(CALL)
    async with one.http() as http:
        client = openai.AsyncOpenAI(api_key="x", base_url="http://test/v1", http_client=http)
        whole = await client.responses.create(model="tiny", input="Weather?", tools=[WEATHER])
        assert whole.output_text == "Let me see."
        assert whole.output[1].arguments == '{"city": "Rome"}'
        async with client.responses.stream(model="tiny", input="Weather?", tools=[WEATHER]) as stream:
            kinds = [event.type async for event in stream]
            final = await stream.get_final_response()
    assert final.output_text == "Let me see."
    assert kinds[-1] == "response.completed"


async def test_finish_reason_abort_is_incomplete():
    one = Rig(Script([[72]], finish_reason=FinishReason.ABORT))
    body = (await respond(one)).json()
    assert (body["status"], body["incomplete_details"]) == ("incomplete", None)
