"""Structured output and tools in requests: what reaches the sampler and the template, and what comes back."""

import json
from enum import Enum

import openai
import pytest
from openai_harness import Rig, events, says
from pydantic import BaseModel

from warmroot.cluster.output_grammar import OutputGrammar
from warmroot.router.openai.chat import ChatCompletion

SCHEMA = {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
ROOM = 4096
CALL = 'Let me see.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'


async def grammar_of(**fields) -> OutputGrammar | None:
    rig = Rig(max_model_len=ROOM)
    response = await rig.chat(**fields)
    assert response.status_code == 200, response.text
    [request] = rig.generator.requests
    return request.params.grammar


def schema_format(schema, **more):
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, **more}}


ASKED = [
    ({"response_format": {"type": "json_object"}}, OutputGrammar.json_schema({"type": "object"})),
    ({"response_format": schema_format(SCHEMA, strict=True)}, OutputGrammar.json_schema(SCHEMA)),
    ({"guided_json": SCHEMA}, OutputGrammar.json_schema(SCHEMA)),
    ({"guided_json": json.dumps(SCHEMA)}, OutputGrammar("json_schema", json.dumps(SCHEMA))),
    ({"guided_regex": "a+"}, OutputGrammar("regex", "a+")),
    ({"guided_choice": ["a", "b"]}, OutputGrammar.choice(["a", "b"])),
    ({"guided_grammar": 'root ::= "a"'}, OutputGrammar("grammar", 'root ::= "a"')),
    ({"structured_outputs": {"json": SCHEMA}}, OutputGrammar.json_schema(SCHEMA)),
    ({"structured_outputs": {"regex": "a+"}}, OutputGrammar("regex", "a+")),
    ({"structured_outputs": {"choice": ["a"]}}, OutputGrammar.choice(["a"])),
    ({"structured_outputs": {"grammar": 'start: "a"'}}, OutputGrammar("grammar", 'start: "a"')),
    ({"structured_outputs": {"json_object": True}}, OutputGrammar.json_schema({"type": "object"})),
    ({"response_format": {"type": "text"}}, None),
    ({"structured_outputs": {}}, None),
    ({"response_format": None, "guided_json": None}, None),
]


@pytest.mark.parametrize(("fields", "grammar"), ASKED)
async def test_what_is_asked_for(fields, grammar):
    assert await grammar_of(**fields) == grammar


async def test_completions_take_it_too():
    rig = Rig()
    assert (await rig.complete(guided_regex="a+")).status_code == 200
    assert rig.generator.requests[0].params.grammar == OutputGrammar("regex", "a+")


def deep(levels: int) -> dict:
    schema: dict = {"type": "string"}
    for _ in range(levels):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


def allowed(mode: str, *names: str) -> dict:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


REFUSED = [
    ({"response_format": {"type": "xml"}}, "response_format.type", "json_schema"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "missing"),
    (
        {"response_format": schema_format({"type": "object", "properties": {"age": {"type": "intger"}}})},
        "response_format.json_schema.schema.properties.age.type",
        "intger",
    ),
    ({"response_format": schema_format({"type": "array", "uniqueItems": True})},
     "response_format.json_schema.schema.uniqueItems", "uniqueItems"),
    ({"guided_json": {"type": "object", "properties": {"not": {"anyOf": [{"type": "null"}, {"not": {}}]}}}},
     "guided_json.properties.not.anyOf.1.not", "not"),
    ({"response_format": schema_format({"$ref": "https://example.com/x"})}, "response_format.json_schema.schema",
     "example.com"),
    ({"response_format": schema_format({"type": "string", "pattern": "("})}, "response_format.json_schema.schema",
     "unclosed group"),
    ({"guided_json": "{"}, "guided_json", "not JSON"),
    ({"guided_json": '"object"'}, "guided_json", "is not of type"),
    ({"guided_regex": "("}, "guided_regex", "unclosed group"),
    ({"guided_choice": []}, "guided_choice", "texts"),
    ({"guided_choice": [""]}, "guided_choice", "empty"),
    ({"guided_grammar": "nonsense :::"}, "guided_grammar", "Expected"),
    ({"structured_outputs": {"regex": "[a"}}, "structured_outputs.regex", "regex"),
    ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs.choice", "exclude"),
    ({"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs.structural_tag", "not supported"),
    ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "response_format", "exclude"),
    ({"guided_regex": "a", "min_tokens": 3}, "min_tokens", "structured output"),
    ({"guided_regex": "a", "ignore_eos": True}, "ignore_eos", "structured output"),
    ({"guided_regex": "a" * 70_000}, "guided_regex", "max_grammar_chars"),
    ({"guided_json": {"enum": list(range(5000))}}, "guided_json", "max_schema_values"),
    ({"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "other"}}},
     "tool_choice.function.name", "none of the tools"),
    ({"tool_choice": "required"}, "tool_choice", "needs tools"),
    ({"tools": [WEATHER], "tool_choice": allowed("required", "weather", "other")},
     "tool_choice.allowed_tools.tools.1.function.name", "none of the tools"),
    ({"tools": [WEATHER], "tool_choice": allowed("never", "weather")}, "tool_choice.allowed_tools.mode", "required"),
    ({"tools": [WEATHER], "tool_choice": {"type": "web_search"}}, "tool_choice", "allowed_tools"),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools.0.function.name", "pattern"),
    ({"tools": [{"type": "web_search"}]}, "tools.0.type", "function"),
    (
        {
            "tool_choice": "required",
            "tools": [WEATHER, {"type": "function", "function": {"name": "f", "parameters": {"type": 5}}}],
        },
        "tools.1.function.parameters.type",
        "5",
    ),
    ({"tools": [WEATHER], "tool_choice": "required", "guided_regex": "a"}, "tool_choice", "exclude"),
    ({"messages": [{"role": "user", "content": "x", "tool_calls": [{"function": {"name": "f", "arguments": ""}}]}]},
     "messages.0.tool_calls", "assistant"),
    ({"messages": [{"role": "tool"}]}, "messages.0.content", "text"),
    ({"messages": [{"role": "function", "content": "x"}]}, "messages.0.role", "function"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "param", "reason"), REFUSED)
async def test_what_cannot_be_had_is_refused_by_its_path(fields, param, reason):
    rig = Rig()
    response = await rig.chat(**fields)
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"] == param
    assert reason in error["message"]
    assert not rig.generator.requests


async def test_deep_schemas_do_not_break_anything():
    assert (await Rig().chat(guided_json=deep(20))).status_code == 200
    for levels in (40, 200, 450):
        response = await Rig().chat(guided_json=json.dumps(deep(levels)))
        assert response.json()["error"]["param"] == "guided_json"
        assert "64 levels" in response.json()["error"]["message"]


async def test_tools_reach_the_prompt():
    rig = Rig(max_model_len=ROOM)
    await rig.chat(tools=[WEATHER])
    await rig.chat(tools=[WEATHER], tool_choice="none")
    shown, hidden = (rig.tokenizer.decode(request.prompt_token_ids) for request in rig.generator.requests)
    assert json.dumps(WEATHER) in shown
    assert "<tool_call>" in shown
    assert "weather" not in hidden


async def test_calls_in_a_whole_answer():
    body = (await Rig(says(CALL), max_model_len=ROOM).chat(tools=[WEATHER])).json()
    ChatCompletion.model_validate(body, strict=True)
    [choice] = body["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] == "Let me see."
    [call] = choice["message"]["tool_calls"]
    assert call["id"].startswith("call_")
    assert call["type"] == "function"
    assert call["function"] == {"name": "weather", "arguments": '{"city": "Rome"}'}


async def test_without_tools_a_call_is_text():
    [choice] = (await Rig(says(CALL)).chat()).json()["choices"]
    assert choice["message"] == {"role": "assistant", "content": CALL, "refusal": None}
    assert choice["finish_reason"] == "stop"


@pytest.mark.parametrize("size", [1, 7, 500])
async def test_a_stream_adds_up_to_the_whole_answer(size):
    text = f"{CALL}\n{CALL.partition(chr(10))[2]}"
    response = await Rig(says(text, size=size), max_model_len=ROOM).chat(tools=[WEATHER], stream=True, n=2)
    for index in range(2):
        own = [c for e in events(response.text)[:-1] for c in e["choices"] if c["index"] == index]
        deltas = [choice["delta"] for choice in own]
        assert "".join(delta.get("content") or "" for delta in deltas) == "Let me see."
        pieces = [piece for delta in deltas for piece in delta.get("tool_calls", ())]
        for number in range(2):
            first, *rest = (piece for piece in pieces if piece["index"] == number)
            assert first["function"]["name"] == "weather"
            assert first["id"].startswith("call_")
            assert not any("name" in piece["function"] or "id" in piece for piece in rest)
            arguments = "".join(piece["function"]["arguments"] for piece in (first, *rest))
            assert arguments == '{"city": "Rome"}'
        assert own[-1]["finish_reason"] == "tool_calls"


async def test_tokens_of_a_call_are_reported_once():
    whole = (
        await Rig(says(CALL, size=3), max_model_len=ROOM).chat(tools=[WEATHER], logprobs=True, return_token_ids=True)
    ).json()
    streamed = await Rig(says(CALL, size=3), max_model_len=ROOM).chat(
        tools=[WEATHER], logprobs=True, return_token_ids=True, stream=True
    )
    choices = [choice for event in events(streamed.text)[:-1] for choice in event["choices"]]
    assert [t for c in choices for t in c.get("token_ids", ())] == whole["choices"][0]["token_ids"]
    entries = [entry for c in choices if c["logprobs"] for entry in c["logprobs"]["content"]]
    assert entries == whole["choices"][0]["logprobs"]["content"]


@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "weather"}}, allowed("required", "weather")]
)
async def test_calls_that_must_come_are_a_grammar(choice):
    grammar = await grammar_of(tools=[WEATHER], tool_choice=choice)
    assert grammar is not None
    assert "<tool_call>" in grammar.text
    assert '"const": "weather"' in grammar.text


async def test_some_of_the_tools():
    rig = Rig(max_model_len=ROOM)
    other = {"type": "function", "function": {"name": "other", "strict": True}}
    assert (await rig.chat(tools=[WEATHER, other], tool_choice=allowed("auto", "weather"))).status_code == 200
    [request] = rig.generator.requests
    assert request.params.grammar is None
    prompt = rig.tokenizer.decode(request.prompt_token_ids)
    assert '"weather"' in prompt
    assert '"other"' not in prompt


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_in_json_holds_no_calls(stream):
    said = json.dumps({"age": 1, "said": CALL})
    rig = Rig(says(said, size=5), max_model_len=ROOM)
    answer = await rig.chat(tools=[WEATHER], response_format=schema_format(SCHEMA), stream=stream)
    if stream:
        choices = [choice for event in events(answer.text)[:-1] for choice in event["choices"]]
        assert "".join(choice["delta"].get("content", "") for choice in choices) == said
    else:
        choices = answer.json()["choices"]
        assert choices[0]["message"]["content"] == said
    assert choices[-1]["finish_reason"] == "stop"


async def test_strict_tools_are_a_grammar_among_text():
    strict = {"type": "function", "function": {**WEATHER["function"], "strict": True}}
    grammar = await grammar_of(tools=[strict])
    assert grammar is not None
    assert "TEXT" in grammar.text
    assert await grammar_of(tools=[WEATHER]) is None
    assert await grammar_of(tools=[strict], guided_regex="a") == OutputGrammar("regex", "a")


async def test_the_conversation_goes_on_after_a_call():
    rig = Rig(max_model_len=ROOM)
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
    messages = [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
    ]
    assert (await rig.chat(messages=messages, tools=[WEATHER])).status_code == 200
    prompt = rig.tokenizer.decode(rig.generator.requests[0].prompt_token_ids)
    assert '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>' in prompt
    assert "<tool_response>\nsunny\n</tool_response>" in prompt


async def test_the_official_client_reads_calls():
    rig = Rig(says(CALL, size=2), max_model_len=ROOM)
    async with rig.http() as http:
        client = openai.AsyncOpenAI(api_key="x", base_url="http://test/v1", http_client=http)
        options = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}], "tools": [WEATHER]}
        whole = await client.chat.completions.create(**options)
        [call] = whole.choices[0].message.tool_calls or []
        assert json.loads(call.function.arguments) == {"city": "Rome"}
        async with client.chat.completions.stream(**options) as stream:
            final = await stream.get_final_completion()
        [streamed] = final.choices[0].message.tool_calls or []
        assert (streamed.function.name, streamed.function.arguments) == (call.function.name, call.function.arguments)
        assert final.choices[0].finish_reason == "tool_calls"


class Unit(Enum):
    """Of a temperature."""

    C = "C"
    F = "F"


class Weather(BaseModel):
    """As users of the official client define tools: nested types become references."""

    city: str
    unit: Unit


async def test_the_official_client_parses_calls_of_several_choices():
    call = '<tool_call>\n{"name": "Weather", "arguments": {"city": "Rome", "unit": "C"}}\n</tool_call>'
    rig = Rig(says(call, size=3), max_model_len=ROOM)
    async with rig.http() as http:
        client = openai.AsyncOpenAI(api_key="x", base_url="http://test/v1", http_client=http)
        options = {
            "model": "tiny",
            "n": 2,
            "messages": [{"role": "user", "content": "Hi"}],
            "tools": [openai.pydantic_function_tool(Weather)],
            "logprobs": True,
        }
        whole = await client.chat.completions.parse(**options)
        async with client.chat.completions.stream(**options, stream_options={"include_usage": True}) as stream:
            final = await stream.get_final_completion()
    for answer in (whole, final):
        assert [choice.finish_reason for choice in answer.choices] == ["tool_calls"] * 2
        calls = [choice.message.tool_calls[0] for choice in answer.choices]
        assert [one.function.parsed_arguments for one in calls] == [Weather(city="Rome", unit=Unit.C)] * 2
        assert len({one.id for one in calls}) == 2
        assert [len(choice.logprobs.content) for choice in answer.choices] == [len(call) + 1] * 2
        assert answer.usage.completion_tokens == 2 * (len(call) + 1)
