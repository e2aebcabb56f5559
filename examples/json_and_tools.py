"""Answers of a given form, and a function that the model calls, through OpenAI's own Python client.

Start ``warmroot serve smollm2``, then anywhere:

    python examples/json_and_tools.py [http://127.0.0.1:8000]
"""

import json
import os
import sys

from openai import OpenAI

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
WEATHER = {
    "name": "get_weather",
    "description": "The weather of a city.",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 20}},
        "required": ["city"],
        "additionalProperties": False,
    },
}


def get_weather(city: str) -> str:
    return f"In {city} the sun shines, at 21 degrees."


def main() -> None:
    url = sys.argv[1] if len(sys.argv) > 1 else os.environ.get("WARMROOT_URL", "http://127.0.0.1:8000")
    client = OpenAI(base_url=f"{url}/v1", api_key=os.environ.get("WARMROOT_API_KEY", "none"))
    model = client.models.list().data[0].id

    answer = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": "Describe a person as JSON, with name and age."}],
        response_format={"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON, "strict": True}},
    )
    print(json.loads(answer.choices[0].message.content))

    messages = [{"role": "user", "content": "What is the weather in Paris?"}]
    tools = [{"type": "function", "function": WEATHER}]
    answer = client.chat.completions.create(
        model=model, messages=messages, tools=tools, tool_choice="required", parallel_tool_calls=False, temperature=0
    )
    message = answer.choices[0].message
    [call] = message.tool_calls
    arguments = json.loads(call.function.arguments)
    result = get_weather(**arguments)
    print(f"{call.function.name}({arguments}) -> {result}")

    messages += [message, {"role": "tool", "tool_call_id": call.id, "content": result}]
    answer = client.chat.completions.create(model=model, messages=messages, tools=tools, max_tokens=48, temperature=0)
    print(answer.choices[0].message.content)


if __name__ == "__main__":
    main()
