"""Structured output, tools, responses and embeddings of a real cluster, by OpenAI's own client."""

import json

import numpy as np
import openai
import pytest

from .cluster_harness import Cluster

pytestmark = [pytest.mark.model, pytest.mark.cluster]
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
WEATHER = {
    "name": "get_weather",
    "description": "The weather of a city.",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 20}, "unit": {"enum": ["C", "F"]}},
        "required": ["city", "unit"],
        "additionalProperties": False,
    },
}
TOOLS = [{"type": "function", "function": WEATHER}]
ASK = [{"role": "user", "content": "What is the weather in Paris?"}]


@pytest.fixture(scope="module")
def sdk(cluster: Cluster):
    with openai.OpenAI(api_key="none", base_url=f"{cluster.url}/v1", max_retries=0) as client:
        yield client


@pytest.mark.parametrize("seed", range(3))
def test_json_of_a_schema(sdk, seed):
    form = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON, "strict": True}}
    messages = [{"role": "user", "content": "Describe a person as JSON."}]
    answer = sdk.chat.completions.create(
        model="smollm2", messages=messages, response_format=form, temperature=1, seed=seed, max_tokens=100
    )
    [choice] = answer.choices
    assert choice.finish_reason == "stop"
    person = json.loads(choice.message.content)
    assert list(person) == ["name", "age"]
    assert 0 <= person["age"] <= 99


def test_vllm_fields_streamed(sdk):
    stream = sdk.completions.create(
        model="smollm2",
        prompt="The sky is",
        stream=True,
        n=3,
        temperature=1,
        extra_body={"structured_outputs": {"choice": ["blue", "red", "green"]}},
    )
    texts = dict.fromkeys(range(3), "")
    for chunk in stream:
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert set(texts.values()) <= {"blue", "red", "green"}


def test_bad_schemas_are_refused_by_their_path(sdk):
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"properties": {"a": {"type": "int"}}}}}
    with pytest.raises(openai.BadRequestError) as refused:
        sdk.chat.completions.create(model="smollm2", messages=ASK, response_format=form)
    assert refused.value.param == "response_format.json_schema.schema.properties.a.type"


def check_call(name: str, arguments: str) -> None:
    assert name == "get_weather"
    found = json.loads(arguments)
    assert set(found) == {"city", "unit"}
    assert found["unit"] in ("C", "F")


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}])
def test_calls_that_must_come(sdk, choice):
    options = {
        "model": "smollm2",
        "messages": ASK,
        "tools": TOOLS,
        "tool_choice": choice,
        "parallel_tool_calls": False,
        "temperature": 0,
        "max_tokens": 120,
    }
    whole = sdk.chat.completions.create(**options).choices[0]
    assert whole.finish_reason == "tool_calls"
    assert whole.message.content is None
    [call] = whole.message.tool_calls
    check_call(call.function.name, call.function.arguments)
    with sdk.chat.completions.stream(**options) as stream:
        final = stream.get_final_completion().choices[0]
    assert final.finish_reason == "tool_calls"
    [streamed] = final.message.tool_calls
    assert streamed.function.arguments == call.function.arguments


def test_the_conversation_goes_on_after_a_call(sdk):
    call = {"id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Paris"}'}}
    messages = [*ASK, {"role": "assistant", "tool_calls": [call]}]
    messages += [{"role": "tool", "tool_call_id": "c1", "content": "sunny, 21 C"}]
    answer = sdk.chat.completions.create(model="smollm2", messages=messages, tools=TOOLS, max_tokens=8)
    assert answer.usage.completion_tokens > 0


def test_responses(sdk):
    text = {"format": {"type": "json_schema", "name": "person", "schema": PERSON, "strict": True}}
    options = {
        "model": "smollm2",
        "input": "A person as JSON.",
        "text": text,
        "temperature": 0,
        "max_output_tokens": 100,
    }
    whole = sdk.responses.create(**options)
    assert whole.status == "completed"
    assert set(json.loads(whole.output_text)) == {"name", "age"}
    with sdk.responses.stream(**options) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_response()
    assert final.output_text == whole.output_text
    assert (kinds[0], kinds[-1]) == ("response.created", "response.completed")
    assert final.usage.input_tokens == whole.usage.input_tokens
    tools = [{"type": "function", **WEATHER}]
    [call] = sdk.responses.create(
        model="smollm2", input="Weather in Paris?", tools=tools, tool_choice="required", parallel_tool_calls=False
    ).output
    check_call(call.name, call.arguments)


def test_embeddings(sdk):
    texts = ["The cat sat on the mat.", "A cat was sitting on a mat.", "Interest rates rose by two percent."]
    answer = sdk.embeddings.create(model="smollm2", input=texts, extra_body={"pooling": "mean"})
    vectors = np.array([entry.embedding for entry in answer.data])
    assert vectors.shape == (3, 576)
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, rtol=1e-5)
    near, far = vectors[0] @ vectors[1], vectors[0] @ vectors[2]
    assert near > far
    floats = sdk.embeddings.create(model="smollm2", input=texts[0], encoding_format="float", dimensions=64)
    assert len(floats.data[0].embedding) == 64
    assert answer.usage.prompt_tokens == answer.usage.total_tokens > 0


def test_nothing_is_left_behind(cluster):
    cluster.wait_idle()
