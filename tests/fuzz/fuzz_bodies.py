"""Bodies of requests: every field with values inside its bounds, at them, beyond them, and of other types."""

import json
from typing import Any

from fuzz_mutate import DEEP, nested
from hypothesis import strategies as st

JUNK = st.one_of(
    st.none(),
    st.booleans(),
    st.sampled_from([0, 1, -1, 2**31, 2**63, 2**64, -(2**63) - 1, 10**30, 10**400]),
    st.sampled_from([0.0, -0.5, 1e308, 1e-320, float("inf"), float("-inf"), float("nan")]),
    st.text(max_size=5),
    st.sampled_from(["", "\ud800", "\udc00\ud800", "\x00", "5", "🙂", "x" * 5000, "<|im_end|>", "é\u0301"]),
    st.lists(st.integers(-2, 300), max_size=3),
    st.sampled_from([[], {}, [None], [[]], [[1], "a"], ["a", 1], {"a": None}, {"": {}}, nested(DEEP), nested(300)]),
)
SHORT = st.text(alphabet="ab é🙂\n<|", min_size=1, max_size=6)
Field = tuple[st.SearchStrategy[Any], tuple[Any, ...]]
"""What is served, and what is refused or at the edge of it."""


def field(*served: Any, odd: tuple[Any, ...] = ()) -> Field:
    return st.sampled_from(served), odd


SWITCH = field(True, False)
COMMON: dict[str, Field] = {
    "model": field("tiny", None, odd=("other", "")),
    "max_tokens": field(1, 2, 5, odd=(0, -1, 2**31, 300)),
    "temperature": field(0, 0.0, 0.7, 1, 2.0, 1e-3, odd=(100, 101, -0.1, 1e-300)),
    "top_p": field(1, 0.5, 0.9, odd=(0, 1.1, 1e-9)),
    "top_k": field(-1, 0, 1, 5, odd=(10_000, -2, 2**31 + 1)),
    "min_p": field(0, 0.5, 1, odd=(1.5,)),
    "n": field(1, 2, 3, odd=(0, -1, 129)),
    "best_of": field(3, odd=(0, 1, 129)),
    "stop": (st.one_of(SHORT, st.lists(SHORT, max_size=5)), ("", [""])),
    "stream": SWITCH,
    "presence_penalty": field(0, 1.5, -2, odd=(2.1,)),
    "frequency_penalty": field(0, -1.5, 2, odd=(-2.1,)),
    "repetition_penalty": field(1, 1.3, 0.01, odd=(0, -1, 101)),
    "logit_bias": field({}, {"97": 100}, {"97": -100, "256": 100}, odd=({"5": 101}, {"999": 1}, {"a": 1}, {"-1": 1})),
    "seed": field(0, 1, -1, 2**64 - 1, -(2**63), None, odd=(2**64,)),
    "user": field("me", None),
    "min_tokens": field(0, 1, odd=(5, 6)),
    "ignore_eos": SWITCH,
    "stop_token_ids": field([], [97], [256, 0], list(range(257)), odd=([257], [-1])),
    "include_stop_str_in_output": SWITCH,
    "skip_special_tokens": SWITCH,
    "speculative": SWITCH,
    "bad_words": field([], ["a"], [" ab"], ["🙂"], odd=(["a", ""],)),
    "allowed_token_ids": field([97, 98], [256], None, [97] * 300, odd=([], [257], [-1])),
    "prompt_logprobs": field(0, 1, 20, None, odd=(21, -1)),
    "truncate_prompt_tokens": field(-1, 1, 5, 10_000, odd=(0, -2)),
    "truncation_side": field("left", "right", None, odd=("middle",)),
    "priority": field(0, -5, 7, odd=(2**31, 2**63, -(2**64), 10**30)),
    "request_id": field("a-1", None, odd=("", "x" * 129, "a b", "é")),
    "cache_salt": field("s", "🙂", None, odd=("", "x" * 1025)),
    "session_id": field("s", "🙂\n", None, odd=("", "x" * 257)),
    "return_token_ids": SWITCH,
    "return_tokens_as_token_ids": SWITCH,
    "use_beam_search": field(False, odd=(True,)),
    "response_format": field(
        {"type": "text"},
        None,
        {"type": "json_object"},
        {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": ["a", "🙂"]}}},
        odd=({}, {"type": "json_schema"}, {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": 1}}}),
    ),
    "structured_outputs": field(None, {}, {"choice": ["ab", "b"]}, odd=({"regex": "("}, {"choice": []}, {"json": "{"})),
    "guided_json": field(None, {"type": "integer"}, '{"type": "null"}', odd=("{", "5", "[]", {"$ref": "#"})),
    "guided_regex": field(None, "[ab]{1,3}", odd=("(", "(a+)+$", "a{1000}{1000}", "")),
    "guided_choice": field(None, ["a", "b"], odd=([], [""], ['"\\'])),
    "guided_grammar": field(None, 'root ::= "a" | "b" root', odd=("", "start: start", "nonsense", "root ::= root")),
    "deadline": field(30.5, odd=(0, -1)),
    "timeout": field(30, odd=(0.5, -1)),
    "unknown": field(1, {"a": []}),
}
MESSAGE = st.fixed_dictionaries(
    {
        "role": st.sampled_from(["user", "system", "assistant", "developer"]),
        "content": st.one_of(SHORT, st.sampled_from(["", [], [{"type": "text", "text": "hi"}]])),
    },
    optional={"name": st.sampled_from(["x", "", None]), "tool_calls": st.sampled_from([[], None])},
)
ODD_MESSAGES = (
    [], [{"role": "tool", "content": "x"}], [{"role": "nobody", "content": "x"}], [{"role": "user"}], [{}], ["hi"],
    [{"role": "user", "content": [{"type": "image_url"}]}], [{"role": "user", "content": [{}]}],
    [{"role": "user", "content": "x" * 300}], [{"role": "assistant", "content": "x", "tool_calls": [{}]}],
)  # fmt: skip
CHAT: dict[str, Field] = {
    **COMMON,
    "messages": (st.lists(MESSAGE, min_size=1, max_size=3), ODD_MESSAGES),
    "max_completion_tokens": field(1, 4, odd=(0, -1, 2**31)),
    "logprobs": SWITCH,
    "top_logprobs": field(None, odd=(0, 1, 20, 21, -1)),
    "add_generation_prompt": field(True, False, None),
    "continue_final_message": field(False, odd=(True,)),
    "add_special_tokens": SWITCH,
    "chat_template": field(None, odd=("{{ 1/0 }}",)),
    "chat_template_kwargs": field(
        None, {}, {"messages": 1}, {"add_generation_prompt": 0}, odd=({"loop": 1, "range": 2, "namespace": 3},)
    ),
    "reasoning_effort": field("low", "", None),
    "tools": field(
        [],
        None,
        [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}],
        odd=([{"type": "function"}], [{"type": "function", "function": {"name": "f", "parameters": {"type": 1}}}]),
    ),
    "tool_choice": field("none", "auto", odd=("required", {}, {"type": "function", "function": {"name": "f"}})),
    "parallel_tool_calls": SWITCH,
    "modalities": field(["text"], None, odd=(["audio"],)),
}
ODD_PROMPTS = (
    [1, "a"], ["a", 1], [[1], "a"], [], [[]], [257], [-1], [2**31], [2**63], [1.5], [True], "a" * 300, [97] * 256,
    [97] * 257, "", [""], {},
)  # fmt: skip
PROMPTS = st.one_of(
    SHORT,
    st.lists(st.integers(0, 256), min_size=1, max_size=8),
    st.lists(SHORT, min_size=1, max_size=3),
    st.lists(st.lists(st.integers(0, 256), min_size=1, max_size=4), min_size=1, max_size=3),
)
COMPLETION: dict[str, Field] = {
    **COMMON,
    "prompt": (PROMPTS, ODD_PROMPTS),
    "echo": field(True, False, None),
    "logprobs": field(0, 1, 5, 20, None, odd=(21, -1)),
    "add_special_tokens": SWITCH,
    "suffix": field("", None, odd=("x",)),
}


@st.composite
def bodies(draw: st.DrawFn, fields: dict[str, Field], required: str) -> dict[str, Any]:
    """Values that are served; in half of all bodies one or two are odd, and in some of those of any kind."""
    optional = sorted(fields.keys() - {required, "max_tokens"})
    names = [required, "max_tokens", *draw(st.lists(st.sampled_from(optional), max_size=7, unique=True))]
    body = {name: draw(fields[name][0]) for name in names}
    if body.get("stream") and draw(st.booleans()):
        body["stream_options"] = draw(st.sampled_from([{}, {"include_usage": True, "continuous_usage_stats": True}]))
    if body.get("logprobs") and required == "messages":
        body["top_logprobs"] = draw(st.sampled_from([0, 1, 20]))
    for name in draw(st.one_of(st.just([]), st.lists(st.sampled_from(sorted(fields)), max_size=2))):
        odd = fields[name][1]
        body[name] = draw(st.one_of(st.sampled_from(odd), JUNK) if odd else JUNK)
    return body


CHAT_BODIES = bodies(CHAT, "messages")
COMPLETION_BODIES = bodies(COMPLETION, "prompt")


@st.composite
def texts_of(draw: st.DrawFn, values: st.SearchStrategy[dict[str, Any]]) -> bytes:
    """As JSON; some with keys that stand there twice, numbers beyond every float, or no JSON at all."""
    text = json.dumps(draw(values))
    match draw(st.sampled_from(["as it is"] * 8 + ["twice", "beyond", "cut", "bytes", "inside"])):
        case "twice":
            text = text[:-1] + ', "n": 1, "n": 2, "stream": false, "max_tokens": 1, "max_tokens": 2}'
        case "beyond":
            text = text.replace("1", "1e400", 1) + draw(st.sampled_from(["", " ", "\x00", "}", "{}"]))
        case "cut":
            text = text[: draw(st.integers(0, len(text)))]
        case "bytes":
            at = draw(st.integers(0, len(text)))
            return text[:at].encode() + draw(st.sampled_from([b"\xff", b"\xed\xa0\x80", b"\x00"])) + text[at:].encode()
        case "inside":
            text = draw(st.sampled_from([f"[{text}]", json.dumps(text), "null", "7", "", "[" * 10_000, '{"a":' * 5000]))
        case _:
            pass
    return text.encode()
