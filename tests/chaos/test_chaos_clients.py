"""Clients try again what they are told to, and what they note is what happened: over real connections."""

import asyncio
import json
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import httpx
import pytest
from openai_harness import listening

from .asks import COMPLETIONS, Ask
from .clients import Clients, Outcome

Reply = Callable[[Callable[[dict], Awaitable[None]]], Awaitable[None]]


def chunk(text: str, **fields) -> bytes:
    return f"data: {json.dumps({'choices': [{'index': 0, 'text': text, **fields}]})}\n\n".encode()


def stream(*parts: bytes, breaks: bool = False) -> Reply:
    async def reply(send) -> None:
        headers = [(b"content-type", b"text/event-stream")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        for part in parts:
            await send({"type": "http.response.body", "body": part, "more_body": True})
            await asyncio.sleep(0.01)
        if breaks:
            raise RuntimeError("the process dies")
        await send({"type": "http.response.body", "body": b""})

    return reply


def refusal(status: int, code: str) -> Reply:
    async def reply(send) -> None:
        headers = [(b"retry-after", b"0")]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": json.dumps({"error": {"code": code}}).encode()})

    return reply


def plain(status: int, body: bytes) -> Reply:
    async def reply(send) -> None:
        await send({"type": "http.response.start", "status": status, "headers": []})
        await send({"type": "http.response.body", "body": body})

    return reply


GOOD = stream(chunk("a"), chunk("b", finish_reason="stop"), b"data: [DONE]\n\n")


@asynccontextmanager
async def server(*replies: Reply) -> AsyncIterator[str]:
    """Gives each request the next reply."""
    left = list(replies)

    async def app(scope, receive, send) -> None:
        await left.pop(0)(send)

    async with listening(app) as url:
        yield url


async def asked(*replies: Reply, leave_after: int | None = None) -> Outcome:
    ask = Ask(number=0, kind="greedy", path=COMPLETIONS, body={}, stream=True, leave_after=leave_after)
    outcome = Outcome(ask, asyncio.get_running_loop().time())
    async with server(*replies) as url, httpx.AsyncClient(trust_env=False) as http:
        await Clients([url], ["key"], "m", [ask]).ask(http, outcome, random.Random(1))
    return outcome


async def test_a_stream_that_ends_is_complete():
    outcome = await asked(GOOD)
    assert (outcome.complete, outcome.lost, outcome.answer[0].text) == (True, "", "ab")
    assert outcome.first_event_s is not None


async def test_what_says_so_before_the_first_token_is_asked_again_and_counted():
    outcome = await asked(refusal(429, "rate_limit_exceeded"), refusal(503, "replica_unavailable"), GOOD)
    assert outcome.complete
    assert outcome.refusals == {"429 rate_limit_exceeded": 1, "503 replica_unavailable": 1}


@pytest.mark.parametrize("status", [400, 500, 504])
async def test_any_other_refusal_loses_the_request(status):
    outcome = await asked(refusal(status, "engine_error"))
    assert not outcome.complete
    assert outcome.lost.startswith(f"{status} engine_error")


async def test_what_a_proxy_says_for_an_ingress_that_is_gone_is_a_broken_connection():
    outcome = await asked(plain(500, b"Internal Server Error"), plain(404, b"Path not found"), GOOD)
    assert outcome.complete
    assert [how for _, how in outcome.cuts] == [
        "500 'Internal Server Error' of a proxy",
        "404 'Path not found' of a proxy",
    ]


async def test_an_error_in_the_stream_loses_the_request():
    outcome = await asked(stream(chunk("a"), b'data: {"error": {"code": "replica_unavailable"}}\n\n'))
    assert outcome.lost == "event {'code': 'replica_unavailable'}"


async def test_a_connection_that_breaks_is_noted_with_what_had_come_and_asked_again():
    outcome = await asked(stream(chunk("a"), breaks=True), stream(chunk("a")), GOOD)
    assert outcome.complete and not outcome.lost
    assert len(outcome.cuts) == 2
    assert [beginning[0].text for beginning in outcome.beginnings] == ["a", "a"]
    assert outcome.answer[0].text == "ab"


async def test_a_client_leaves_after_so_many_events():
    outcome = await asked(stream(chunk("a"), chunk("b"), chunk("c"), b"data: [DONE]\n\n"), leave_after=2)
    assert (outcome.complete, outcome.lost, outcome.answer[0].text) == (False, "", "ab")
    assert outcome.ended
