"""Whole bodies and streams of both APIs read alike, and no difference between two answers is overlooked."""

import copy
import json

import pytest
from openai_harness import Rig, events, says

from .answers import Answer, Choice, Fork, add, compare, from_json, to_json
from .asks import COMPLETIONS, Ask
from .ties import NUDGE, nudged, takes


async def whole_and_streamed(path: str, body: dict) -> tuple[Answer, Answer]:
    rig = Rig(says("Hello, world!", cached_tokens=4))
    answers: tuple[Answer, Answer] = ({}, {})
    add(answers[0], (await rig.post(path, body)).json())
    for chunk in events((await rig.post(path, body | {"stream": True})).text):
        if chunk != "[DONE]":
            add(answers[1], chunk)
    return answers


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "Hi"}),
        ("/v1/completions", {"prompt": "Hi", "n": 2, "stop": ["wor"]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}]}),
    ],
)
async def test_whole_and_streamed_answers_are_the_same(path, body):
    whole, streamed = await whole_and_streamed(path, body | {"model": "tiny", "return_token_ids": True})
    assert whole == streamed
    assert whole[0].text == ("Hello, " if "stop" in body else "Hello, world!")
    assert whole[0].token_ids[:2] == [ord("H"), ord("e")]
    assert whole[0].finish_reason == "stop"
    assert len(whole) == body.get("n", 1)


def right() -> Answer:
    logprobs = [("a", -0.5, {"a": -0.5, "b": -0.9}), ("b", -0.25, {"b": -0.25, "c": -2.0}), ("c", -0.1, {"c": -0.1})]
    return {0: Choice("abc", [1, 2, 3], logprobs, "length", None)}


def changed(**fields) -> Answer:
    answer = right()
    for name, value in fields.items():
        setattr(answer[0], name, value)
    return answer


def verdict(got: Answer, *, complete: bool = True) -> str:
    return "wrong" if compare(right(), got, complete=complete).why else "equal"


def test_equal_answers_survive_a_file():
    assert from_json(json.loads(json.dumps(to_json(right())))) == right()
    assert verdict(right()) == "equal"


def test_rounding_of_a_logprob_is_no_difference_and_is_told():
    got = copy.deepcopy(right())
    got[0].logprobs[1] = ("b", -0.2501, {"b": -0.2501, "c": -2.0})
    found = compare(right(), got, complete=True)
    assert found.why == ""
    assert found.logprob_error == pytest.approx(1e-4)


@pytest.mark.parametrize(
    "got",
    [
        changed(token_ids=[1, 9, 3]),
        changed(token_ids=[1, 2]),
        changed(token_ids=[1, 2, 3, 3]),
        changed(text="abx"),
        changed(text="ab"),
        changed(finish_reason="stop"),
        changed(stop_reason="c"),
        changed(logprobs=right()[0].logprobs[:2]),
        changed(logprobs=[*right()[0].logprobs[:2], ("c", -0.2, {"c": -0.2})]),
        changed(logprobs=[*right()[0].logprobs[:2], ("x", -0.1, {"c": -0.1})]),
        {0: right()[0], 1: right()[0]},
        {},
    ],
)
def test_no_difference_is_overlooked(got):
    assert verdict(got) == "wrong"


def test_a_beginning_is_right_if_the_right_answer_begins_so():
    beginning = changed(token_ids=[1, 2], text="ab", logprobs=right()[0].logprobs[:2], finish_reason=None)
    assert verdict(beginning, complete=False) == "equal"
    assert verdict({}, complete=False) == "equal"
    assert verdict(changed(token_ids=[1, 9], text="ab", finish_reason=None), complete=False) == "wrong"
    assert verdict(changed(token_ids=[1, 2, 3, 4], text="abc", finish_reason=None), complete=False) == "wrong"


def test_a_fork_is_where_the_tokens_part():
    assert compare(right(), changed(token_ids=[1, 9, 9]), complete=True).fork == Fork(0, 1, right=2, got=9)
    assert compare(right(), changed(token_ids=[1]), complete=True).fork is None


def test_a_tie_is_a_token_that_a_nudge_brings_about_after_the_same_tokens():
    fork, got = Fork(0, 1, right=2, got=9), changed(token_ids=[1, 9, 9])
    assert takes(changed(token_ids=[1, 9, 5]), fork, got)
    assert not takes(right(), fork, got)
    assert not takes(changed(token_ids=[4, 9, 9]), fork, got)


def test_a_nudge_is_small_and_changes_nothing_else():
    body = {"prompt": "x", "temperature": 0.8, "top_p": 0.9, "seed": 3}
    ask = Ask(number=0, kind="sampled", path=COMPLETIONS, body=body, stream=False)
    bodies = [asked for _, asked in nudged(ask, Fork(0, 1, right=2, got=9))]
    assert len(bodies) == 13
    for asked in bodies:
        assert asked["seed"] == 3
        assert asked["temperature"] == pytest.approx(0.8, rel=1.01 * NUDGE)
        assert asked["top_p"] == pytest.approx(0.9, rel=1.01 * NUDGE)
        assert all(abs(bias) == NUDGE for bias in asked.get("logit_bias", {}).values())
    greedy = Ask(number=0, kind="greedy", path=COMPLETIONS, body={"temperature": 0}, stream=False)
    assert len(nudged(greedy, Fork(0, 1, right=2, got=9))) == 5
