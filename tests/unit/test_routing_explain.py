"""Why a request went where it went: the admin route and the header of one request."""

import json

import httpx
import pytest
from engine_deployment import ADMIN, CACHED, PROMPT, Deployment

ASK = {"authorization": "Bearer sk-a"}
LOOK = {"authorization": f"Bearer {ADMIN}"}


@pytest.fixture
async def deployment():
    made = Deployment()
    await made.follow()
    return made


async def send(deployment, method, path, **options):
    transport = httpx.ASGITransport(deployment.app)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        answer = await client.request(method, path, **options)
    assert answer.status_code == 200, answer.text
    return answer


async def complete(deployment, headers=None, **fields):
    body = {"prompt": PROMPT, "max_tokens": 2, **fields}
    answer = await send(deployment, "POST", "/v1/completions", json=body, headers={**ASK, **(headers or {})})
    await deployment.follow()
    return answer


async def explain(deployment, **params):
    answer = await send(deployment, "GET", "/admin/routing/explain", params=params, headers=LOOK)
    return answer.json()["choices"]


async def test_the_latest_choices_newest_first(deployment):
    first = (await complete(deployment)).json()["id"]
    second = (await complete(deployment)).json()["id"]
    choices = await explain(deployment)
    assert [choice["request_id"].startswith(id_) for choice, id_ in zip(choices, (second, first), strict=True)] == [
        True
    ] * 2
    warm, cold = choices
    assert (cold["reason"], cold["predicted_tokens"], cold["actual_tokens"]) == ("cold", 0, 0)
    assert (warm["reason"], warm["prompt_tokens"], warm["refusals"]) == ("warm", len(PROMPT), [])
    assert (warm["predicted_tokens"], warm["actual_tokens"]) == (16, CACHED)
    assert warm["replica"] == cold["replica"] == warm["candidates"][0]["replica"]
    assert sorted(candidate["replica"] for candidate in warm["candidates"]) == ["r0", "r1"]
    assert [candidate["cached_tokens"] for candidate in warm["candidates"]] == [16, 0]
    costs = [candidate["cost"] for candidate in warm["candidates"]]
    assert costs[0] < costs[1]
    assert len(await explain(deployment, limit=1)) == 1


async def test_one_request_by_the_id_of_its_response(deployment):
    ids = [(await complete(deployment)).json()["id"] for _ in range(3)]
    (choice,) = await explain(deployment, request_id=ids[1])
    assert choice["request_id"].startswith(ids[1])
    assert await explain(deployment, request_id="cmpl-nobody") == []


@pytest.mark.parametrize("stream", [False, True])
async def test_a_header_explains_one_request(deployment, stream):
    await complete(deployment)
    answer = await complete(deployment, {"x-warmroot-explain": "1"}, stream=stream)
    choice = json.loads(answer.headers["x-warmroot-routing"])
    assert choice["replica"] == answer.headers["x-warmroot-replica"]
    assert (choice["reason"], choice["actual_tokens"]) == ("warm", CACHED)
    assert len(choice["candidates"]) == 2


@pytest.mark.parametrize("headers", [{}, {"x-warmroot-explain": "0"}, {"x-warmroot-explain": "false"}])
async def test_nobody_else_pays_for_it(deployment, headers):
    assert "x-warmroot-routing" not in (await complete(deployment, headers)).headers


async def test_a_stranger_is_told_nothing(deployment):
    transport = httpx.ASGITransport(deployment.app)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        assert (await client.get("/admin/routing/explain")).status_code == 401
