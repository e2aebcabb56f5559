"""The API behind a real server on loopback: OpenAI's own client, clients that leave, and big bodies."""

import asyncio
import json
import random
from urllib.parse import urlsplit

import httpx
import openai
import pytest
from openai_harness import Rig, says
from scripted_generator import Script

from warmroot.cluster.errors import EngineError, OverloadedError

ENDLESS = Script([[97]], forever=True, delay=0.002)
SILENT = Script([[97]], delay=60.0)
MESSAGES = [{"role": "user", "content": "Hi"}]


def client_of(url: str, key: str = "unused", retries: int = 0) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key, max_retries=retries)


async def test_openai_client_chat():
    async with Rig(says("Grüß dich 🎉")).listening() as url, client_of(url) as client:
        whole = await client.chat.completions.create(
            model="tiny", messages=MESSAGES, n=2, logprobs=True, top_logprobs=2, temperature=0, seed=1, stop=["x"]
        )
        assert [choice.message.content for choice in whole.choices] == ["Grüß dich 🎉"] * 2
        assert (
            bytes(b for entry in whole.choices[0].logprobs.content[:-1] for b in entry.bytes).decode() == "Grüß dich 🎉"
        )
        stream = await client.chat.completions.create(
            model="tiny", messages=MESSAGES, n=2, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
    texts = ["", ""]
    for chunk in chunks[:-1]:
        assert chunk.usage is None
        texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert texts == ["Grüß dich 🎉"] * 2
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert chunks[0].choices[0].delta.role == "assistant"


async def test_openai_client_accumulates_the_stream():
    async with (
        Rig().listening() as url,
        client_of(url) as client,
        client.chat.completions.stream(model="tiny", messages=MESSAGES) as stream,
    ):
        async for _ in stream:
            pass
        final = await stream.get_final_completion()
    assert final.choices[0].message.content == "Hello!"
    assert final.choices[0].finish_reason == "stop"


async def test_openai_client_completions_models_and_headers():
    async with Rig().listening() as url, client_of(url) as client:
        answer = await client.completions.create(model="tiny", prompt=["a", "b"], echo=True, max_tokens=3)
        assert [choice.text for choice in answer.choices] == ["aHel", "bHel"]
        assert [model.id async for model in client.models.list()] == ["tiny", "alias"]
        assert (await client.models.retrieve("tiny")).id == "tiny"
        raw = await client.completions.with_raw_response.create(
            model="tiny", prompt="a", stream=True, extra_headers={"x-request-id": "mine"}, extra_body={"top_k": 5}
        )
        assert raw.headers["x-request-id"] == "mine"
        assert raw.headers["x-warmroot-replica"] == "r0"
        assert "".join([chunk.choices[0].text async for chunk in raw.parse()]) == "Hello!"


async def test_openai_client_understands_our_errors():
    rig = Rig(Script([], error=OverloadedError("full", retry_after=0.5)), api_keys=({"key": "sk-1"},))
    async with rig.listening() as url:
        async with client_of(url, "sk-1") as client:
            with pytest.raises(openai.RateLimitError) as limited:
                await client.chat.completions.create(model="tiny", messages=MESSAGES, stream=True)
            assert limited.value.response.headers["retry-after-ms"] == "500"
            with pytest.raises(openai.NotFoundError) as missing:
                await client.chat.completions.create(model="nope", messages=MESSAGES)
            assert (missing.value.code, missing.value.param) == ("model_not_found", "model")
            with pytest.raises(openai.BadRequestError):
                await client.chat.completions.create(model="tiny", messages=MESSAGES, temperature=-1)
        async with client_of(url, "wrong") as client:
            with pytest.raises(openai.AuthenticationError):
                await client.models.list()


async def test_openai_client_raises_an_error_in_the_stream():
    async with Rig(Script([[97]], error=EngineError("gone"))).listening() as url, client_of(url) as client:
        stream = await client.chat.completions.create(model="tiny", messages=MESSAGES, stream=True)
        with pytest.raises(openai.APIError, match="gone"):
            async for _ in stream:
                pass


async def test_openai_client_retries_when_told_to():
    scripts = iter([Script([], error=OverloadedError("full", retry_after=0.01)), says("ok")])
    async with Rig(lambda request: next(scripts)).listening() as url, client_of(url, retries=1) as client:
        answer = await client.chat.completions.create(model="tiny", messages=MESSAGES)
    assert answer.choices[0].message.content == "ok"


async def start(
    url: str, body: dict, path: str = "/v1/chat/completions"
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A request on a socket of its own."""
    address = urlsplit(url)
    reader, writer = await asyncio.open_connection(address.hostname, address.port)
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n"
    writer.write(head.encode() + data)
    await writer.drain()
    return reader, writer


async def leave(writer: asyncio.StreamWriter) -> None:
    writer.close()
    await writer.wait_closed()


@pytest.mark.parametrize("n", [1, 3])
async def test_leaving_a_stream_closes_it(n):
    rig = Rig(ENDLESS)
    async with rig.listening() as url:
        reader, writer = await start(url, {"messages": MESSAGES, "stream": True, "n": n})
        await reader.readuntil(b'"content":"a"')
        assert rig.generator.live == n
        await leave(writer)
        await rig.idle()
    assert rig.generator.aborted == n


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("script", [SILENT, ENDLESS], ids=["before the first token", "while tokens come"])
async def test_leaving_before_there_is_a_response_closes_it(script, stream):
    rig = Rig(script)
    body = {"prompt": ["a", "b"], "n": 2, "stream": stream and script is SILENT, "max_tokens": 400}
    async with rig.listening() as url:
        _, writer = await start(url, body, "/v1/completions")
        while rig.generator.live < 4:
            await asyncio.sleep(0.001)
        await leave(writer)
        await rig.idle()
    assert rig.generator.aborted == 4


async def test_clients_that_leave_at_random_leave_nothing_behind():
    rig = Rig(ENDLESS)
    chance = random.Random(1)

    async def visit(url: str, wait: float, stream: bool) -> None:
        _, writer = await start(url, {"messages": MESSAGES, "stream": stream, "n": chance.choice([1, 2])})
        await asyncio.sleep(wait)
        await leave(writer)

    async with rig.listening() as url:
        visits = [visit(url, chance.uniform(0, 0.1), chance.random() < 0.5) for _ in range(60)]
        await asyncio.gather(*visits)
        await rig.idle()
        async with httpx.AsyncClient() as client:
            assert (await client.get(f"{url}/health")).status_code == 200
    assert rig.generator.started == rig.generator.aborted


async def test_a_connection_serves_the_next_request_after_a_stream():
    rig = Rig()
    async with rig.listening() as url:
        limits = httpx.Limits(max_connections=1)
        async with httpx.AsyncClient(limits=limits) as client:
            for stream in (True, False, True, False):
                response = await client.post(
                    f"{url}/v1/chat/completions", json={"messages": MESSAGES, "stream": stream}
                )
                assert "!" in response.text
    assert (rig.generator.started, rig.generator.live) == (4, 0)


async def test_half_a_body_is_no_request():
    rig = Rig()
    async with rig.listening() as url:
        address = urlsplit(url)
        _, writer = await asyncio.open_connection(address.hostname, address.port)
        writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{")
        await writer.drain()
        await leave(writer)
        async with httpx.AsyncClient() as client:
            assert (await client.get(f"{url}/livez")).status_code == 200
    assert rig.generator.started == 0


@pytest.mark.parametrize("chunked", [False, True])
async def test_a_client_can_read_413_while_it_sends(chunked):
    body = json.dumps({"prompt": "x" * 3_000_000}).encode()

    async def parts():
        for start_ in range(0, len(body), 65536):
            yield body[start_ : start_ + 65536]

    async with Rig(max_body_bytes=100_000).listening() as url, httpx.AsyncClient() as client:
        headers = {"content-type": "application/json"}
        content = parts() if chunked else body
        response = await client.post(f"{url}/v1/completions", content=content, headers=headers)
    assert response.status_code == 413
    assert response.json()["error"]["code"] == "payload_too_large"


async def test_many_streams_at_once():
    rig = Rig(lambda request: says(f"answer {len(request.prompt_token_ids)}", delay=0.001))
    async with rig.listening() as url, client_of(url) as client:

        async def ask(length: int) -> str:
            stream = await client.completions.create(model="tiny", prompt="x" * length, stream=True, max_tokens=50)
            return "".join([chunk.choices[0].text async for chunk in stream])

        assert await asyncio.gather(*map(ask, range(1, 41))) == [f"answer {length}" for length in range(1, 41)]
    assert rig.generator.live == 0
