"""Tool calls in text: what prompts say of tools, what is found in answers, and what must come."""

import json
import random
from datetime import datetime

import pytest
from openai_harness import END, byte_tokenizer

from warmroot.actors.runner.guides import Guides
from warmroot.cluster.output_grammar import OutputGrammar
from warmroot.router.chat_template import ChatTemplate
from warmroot.router.grammar_library import fault_of
from warmroot.router.tool_calls import CallPiece, ToolCallParser
from warmroot.router.tool_formats import TOOL_FORMATS, tool_format_of

HERMES, LLAMA3 = TOOL_FORMATS["hermes"], TOOL_FORMATS["llama3_json"]
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}}, "required": ["city"]},
    },
}
NESTED = f'{{"a": {"[" * 5000}{"]" * 5000}}}'
CASES = [
    (
        HERMES,
        'One <b>\n<tool_call>\n{"name": "f", "arguments": {"a": "}{\\"", "b": [1, {"c": 2}]}}\n</tool_call>\n'
        '<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call>',
        "One <b>",
        [("f", '{"a": "}{\\"", "b": [1, {"c": 2}]}'), ("g", "{}")],
    ),
    (
        HERMES,
        '<tool_call>[{"name": "f", "arguments": {"x": 1}}, {"arguments": {"y": 2}, "name": "g"}]</tool_call> and so on',
        "and so on",
        [("f", '{"x": 1}'), ("g", '{"y": 2}')],
    ),
    (HERMES, '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', "", [("f", '{"a": 1}')]),
    (HERMES, "1 < 2 <tool", "1 < 2 <tool", []),
    (HERMES, "<tool_call>nonsense</tool_call>", "<tool_call>nonsense</tool_call>", []),
    (HERMES, '<tool_call>{"nam": 1}</tool_call> z', '<tool_call>{"nam": 1}</tool_call> z', []),
    (HERMES, '<tool_call>{"name": "f", "argu', '<tool_call>{"name": "f", "argu', []),
    (HERMES, '<tool_call>{"name": "f", "arguments": {"a": 1', "", [("f", '{"a": 1')]),
    (HERMES, "no calls\n\nat all \n", "no calls\n\nat all \n", []),
    (HERMES, "", "", []),
    (
        LLAMA3,
        '{"name": "f", "parameters": {"a": 1} } ; {"name": "g", "parameters": {}}',
        "",
        [("f", '{"a": 1}'), ("g", "{}")],
    ),
    (LLAMA3, 'Hello {"name": "f"}', 'Hello {"name": "f"}', []),
    (LLAMA3, '{"a": 1} is JSON', '{"a": 1} is JSON', []),
    (LLAMA3, '{"name": "Ann", "age": 3}', '{"name": "Ann", "age": 3}', []),
    (HERMES, '<tool_call>{"name": "f"}</tool_call>', "", [("f", "{}")]),
    (HERMES, '<tool_call>{"name": "f", "arguments": null}</tool_call>', "", [("f", "{}")]),
    (HERMES, f"<tool_call>{NESTED}</tool_call>", f"<tool_call>{NESTED}</tool_call>", []),
]


def found(form, text: str, cuts: random.Random | None = None, most_calls: int | None = None):
    """(content, calls) of a text that comes in pieces."""
    parser = ToolCallParser(form, most_calls)
    pieces, at = [], 0
    while at < len(text):
        size = len(text) if cuts is None else cuts.randint(1, 4)
        pieces += parser.push(text[at : at + size])
        at += size
    pieces += parser.flush()
    content, names, arguments = "", {}, {}
    for piece in pieces:
        if not isinstance(piece, CallPiece):
            content += piece
            continue
        assert (piece.name is not None) == (piece.index not in names), "the name comes once, and first"
        names.setdefault(piece.index, piece.name)
        arguments[piece.index] = arguments.get(piece.index, "") + piece.arguments
    return content, [(names[index], arguments[index]) for index in names]


@pytest.mark.parametrize(("form", "text", "content", "calls"), CASES)
def test_answers(form, text, content, calls):
    assert found(form, text) == (content, calls)


@pytest.mark.parametrize(("form", "text", "content", "calls"), CASES)
def test_answers_in_pieces(form, text, content, calls):
    for seed in range(30):
        assert found(form, text, random.Random(seed)) == (content, calls)


def test_arguments_stream():
    parser = ToolCallParser(HERMES)
    assert parser.push('<tool_call>\n{"name": "f", "arguments": ') == []
    assert parser.push('{"city": "Ro') == [CallPiece(0, "f", '{"city": "Ro')]
    assert parser.push('me"') == [CallPiece(0, None, 'me"')]
    assert parser.push("}}\n</tool_call>") == [CallPiece(0, None, "}")]
    assert parser.flush() == []


def test_one_call_at_most():
    _, text, _, calls = CASES[0]
    assert found(HERMES, text, most_calls=1) == ("One <b>", calls[:1])


@pytest.mark.parametrize("form", [HERMES, LLAMA3])
@pytest.mark.parametrize("is_token", [False, True])
def test_what_must_come_is_what_is_found(form, is_token):
    grammar = form.grammar([WEATHER], parallel=True, is_token=is_token)
    if not is_token:
        assert fault_of(grammar) == ""
    guides = Guides(byte_tokenizer, 257, (END,))
    body = json.dumps({"name": "weather", form.arguments_key: {"city": "Oslo"}})
    call = "\n".join(line for line in (form.opens, body, form.closes) if line)
    if not is_token:
        matcher = guides._compile(grammar)
        assert matcher.consume_tokens(list((call + form.between + call).encode())), matcher.get_error()
        assert matcher.is_accepting()
        wrong = guides._compile(grammar)
        assert not wrong.consume_tokens(list(call.replace("Oslo", "Bern").encode()))
        alone = guides._compile(form.grammar([WEATHER], parallel=False, is_token=False))
        assert alone.consume_tokens(list(call.encode()))
        assert not alone.consume_tokens(list(form.between.encode()))
    assert found(form, call + form.between + call) == ("", [("weather", '{"city": "Oslo"}')] * 2)


@pytest.mark.parametrize("form", [HERMES, LLAMA3])
@pytest.mark.parametrize("must_call", [False, True])
def test_references_stay_in_their_schema(form, must_call):
    """As pydantic writes nested models; both schemas have a definition of that name."""

    def function(name: str, *values: str) -> dict:
        parameters = {
            "$defs": {"Unit": {"enum": values}},
            "type": "object",
            "properties": {"unit": {"$ref": "#/$defs/Unit"}, "next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}},
            "required": ["unit"],
            "additionalProperties": False,
        }
        return {"type": "function", "function": {"name": name, "parameters": parameters}}

    tools = [function("f", "C", "F"), function("g", "m")]
    grammar = form.grammar(tools, must_call=must_call, parallel=True, is_token=False)
    assert fault_of(grammar) == ""
    guides = Guides(byte_tokenizer, 257, (END,))

    def accepts(name: str, arguments: dict) -> bool:
        body = json.dumps({"name": name, form.arguments_key: arguments})
        call = "\n".join(line for line in (form.opens, body, form.closes) if line)
        return guides._compile(grammar).consume_tokens(list(call.encode()))

    assert accepts("f", {"unit": "F", "next": {"unit": "C"}})
    assert accepts("g", {"unit": "m"})
    assert not accepts("f", {"unit": "m"})
    assert not accepts("g", {"unit": "m", "next": {"unit": "C"}})


@pytest.mark.parametrize("form", [HERMES, LLAMA3])
def test_calls_among_text(form):
    """Anything may be said, but what begins as a call is one."""
    guides = Guides(byte_tokenizer, 257, (END,))
    grammar = form.grammar([WEATHER], must_call=False, parallel=True, is_token=False)
    assert fault_of(grammar) == ""
    body = json.dumps({"name": "weather", form.arguments_key: {"city": "Oslo"}})
    call = "\n".join(line for line in (form.opens, body, form.closes) if line)

    def accepts(text: str) -> bool:
        matcher = guides._compile(grammar)
        return matcher.consume_tokens(list(text.encode())) and matcher.is_accepting()

    assert accepts("")
    assert accepts("Just < text\n")
    assert accepts(call)
    assert not accepts(call.replace("Oslo", "Bern"))
    assert not accepts(call.replace("weather", "wetter"))
    if form is HERMES:
        assert accepts(f"Let me see.\n{call}\n{call}\nThere.")
        assert not accepts(call[:-20])


def template(source: str) -> ChatTemplate:
    return ChatTemplate(source, {}, datetime.now)


def test_templates_that_know_tools():
    assert template("{% if tools %}{{ tools | tojson }}{% endif %}").takes_tools
    assert not template("{% for m in messages %}{{ m.content }}{% endfor %}").takes_tools


@pytest.mark.parametrize("form", [HERMES, LLAMA3])
def test_conversations_for_templates_that_do_not(form):
    called = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": {"city": "Rome"}}}
    messages = [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "tool_calls": [called]},
        {"role": "tool", "content": "sunny", "tool_call_id": "c1"},
    ]
    system, user, assistant, answer = form.plain(messages, [WEATHER])
    assert system["role"] == "system"
    assert json.dumps(WEATHER) in system["content"]
    assert user == messages[0]
    assert found(form, assistant["content"]) == ("", [("weather", '{"city": "Rome"}')])
    assert answer == {"role": "user", "content": "<tool_response>\nsunny\n</tool_response>"}
    [joined, _] = form.plain([{"role": "system", "content": "Be kind."}, messages[0]], [WEATHER])
    assert joined["content"].startswith("Be kind.\n\n")


def test_the_format_follows_the_template():
    assert tool_format_of("auto", None) is HERMES
    assert tool_format_of("auto", "{{ '<tool_call>' }}") is HERMES
    assert tool_format_of("auto", "{{ 'Environment: ipython' }}") is LLAMA3
    assert tool_format_of("llama3_json", "<tool_call>") is LLAMA3


def test_grammars_travel():
    grammar = HERMES.grammar([WEATHER], parallel=False, is_token=False)
    assert OutputGrammar(*grammar) == grammar
