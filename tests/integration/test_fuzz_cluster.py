"""What tests/fuzz does to the API, done to a real cluster: Serve's proxy, an ingress, two replicas of a real model."""

import asyncio
import json
from collections import Counter
from random import Random
from urllib.parse import urlsplit

import httpx
import pytest
from fuzz_bodies import CHAT_BODIES, COMPLETION_BODIES
from fuzz_clients import BROKEN, REQUEST, talk
from fuzz_described import check_operation, operations
from fuzz_examples import examples
from hypothesis import given
from schemathesis.generation import GenerationMode

from .cluster_harness import Cluster

pytestmark = [pytest.mark.cluster, pytest.mark.model, pytest.mark.slow]
SMOLLM2 = REQUEST.replace(b'"tiny"', b'"smollm2"').replace(b"Content-Length: ", b"X-Old: ")


def with_length(request: bytes) -> bytes:
    head, _, body = request.partition(b"\r\n\r\n")
    return head + b"\r\nContent-Length: %d\r\n\r\n" % len(body) + body


def check_alive(cluster: Cluster, client: httpx.Client) -> None:
    body = {"model": "smollm2", "prompt": "hello", "max_tokens": 3, "temperature": 0}
    answer = client.post("/v1/completions", json=body)
    assert answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] == 3, answer.text
    cluster.wait_idle()


@pytest.mark.parametrize(
    ("path", "bodies"), [("/v1/chat/completions", CHAT_BODIES), ("/v1/completions", COMPLETION_BODIES)]
)
def test_bodies(cluster, client, path, bodies):
    statuses = Counter[int]()

    @examples(300)
    @given(bodies)
    def send(body):
        if body.get("model") == "tiny":
            body["model"] = "smollm2"
        answer = client.post(path, content=json.dumps(body).encode(), headers={"content-type": "application/json"})
        assert answer.status_code < 500 or answer.status_code in (503, 504), (answer.status_code, answer.text)
        statuses[answer.status_code] += 1
        if answer.status_code >= 400:
            assert answer.json()["error"]["message"]

    send()
    assert statuses[200] > 50 and statuses[400] > 20, statuses
    check_alive(cluster, client)


def test_answers_are_as_described(cluster, client):
    statuses = Counter[int]()

    def send(case):
        request = case.as_transport_kwargs(base_url=cluster.url)
        request.pop("cookies", None)
        if isinstance(body := request.get("json"), dict):  # of the model that is there, and briefly
            body.pop("max_completion_tokens", None)
            limit = "max_output_tokens" if request["url"].endswith("/responses") else "max_tokens"
            body |= {"model": "smollm2", limit: 4}
        answer = client.request(**request)
        statuses[answer.status_code] += 1
        return answer

    for operation in operations(client.get("/openapi.json").json(), cluster.url):
        check_operation(operation, GenerationMode.POSITIVE, 8, send)
    assert statuses[200] > 20, statuses
    check_alive(cluster, client)


async def test_hostile_clients(cluster, client):
    port = urlsplit(cluster.url).port
    request = with_length(SMOLLM2)
    for data in BROKEN:
        heard = await talk(port, data)
        if not data.startswith(b"PRI "):  # the proxy speaks HTTP/2 to whoever begins so
            assert not heard or heard.startswith(b"HTTP/1."), heard[:200]
            assert not heard or int(heard.split(b" ", 2)[1]) not in (500, 502), (data[:200], heard[:500])
    cuts = Random(0).sample(range(len(request)), 40)
    await asyncio.gather(*(talk(port, request[:at], reads=0) for at in cuts))
    await asyncio.gather(*(talk(port, request, reads=at) for at in range(1, 8000, 400)))
    await asyncio.gather(*(talk(port, *(bytes([byte]) for byte in request[:80]), pause_s=0.01) for _ in range(30)))
    await asyncio.to_thread(check_alive, cluster, client)
