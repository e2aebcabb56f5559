"""``/v1/embeddings`` over a scripted generator: what is asked of the engine, and how vectors come back."""

import base64

import numpy as np
import openai
import pytest
from openai_harness import Rig
from scripted_generator import Script

from warmroot.cluster.messages import FinishReason, GenerateRequest
from warmroot.router.openai.embeddings import EmbeddingList


def vector_of(request: GenerateRequest) -> np.ndarray:
    """(its first token, 3, 4, 0)."""
    return np.array([request.prompt_token_ids[0], 3, 4, 0], "<f4")


def rig(**options) -> Rig:
    return Rig(
        lambda request: Script(
            [[]],
            FinishReason.LENGTH,
            embedding=vector_of(request).tobytes(),
            cached_tokens=len(request.prompt_token_ids) // 2,
        ),
        **options,
    )


async def embed(one: Rig, given, **fields):
    return await one.post("/v1/embeddings", {"model": "tiny", "input": given, **fields})


async def test_vectors_of_several_texts():
    one = rig()
    response = await embed(one, ["ab", "c"])
    body = response.json()
    EmbeddingList.model_validate(body, strict=True)
    assert body["object"] == "list"
    assert body["model"] == "tiny"
    assert body["usage"] == {"prompt_tokens": 3, "total_tokens": 3}
    for index, first in enumerate((ord("a"), ord("c"))):
        expected = np.array([first, 3, 4, 0]) / np.linalg.norm([first, 3, 4])
        assert body["data"][index]["index"] == index
        np.testing.assert_allclose(body["data"][index]["embedding"], expected, rtol=1e-6)
    assert response.headers["x-warmroot-replica"] == "r0"
    for request in one.generator.requests:
        assert request.params.max_tokens == 0
        assert request.params.pooling == "last"


@pytest.mark.parametrize("given", ["ab", [97, 98], [[97, 98]], ["ab"]])
async def test_forms_of_input(given):
    one = rig()
    assert (await embed(one, given, pooling="mean")).status_code == 200
    [request] = one.generator.requests
    assert request.prompt_token_ids == [97, 98]
    assert request.params.pooling == "mean"


async def test_as_they_are_and_shortened():
    plain = (await embed(rig(), "a", normalize=False)).json()["data"][0]["embedding"]
    assert plain == [97.0, 3.0, 4.0, 0.0]
    short = (await embed(rig(), "a", dimensions=2)).json()["data"][0]["embedding"]
    np.testing.assert_allclose(short, np.array([97, 3]) / np.linalg.norm([97, 3]), rtol=1e-6)
    assert len((await embed(rig(), "a", dimensions=4)).json()["data"][0]["embedding"]) == 4


async def test_base64():
    encoded = (await embed(rig(), "a", encoding_format="base64", normalize=False)).json()["data"][0]["embedding"]
    assert np.frombuffer(base64.b64decode(encoded), "<f4").tolist() == [97.0, 3.0, 4.0, 0.0]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"input": [""]}, "input"),
        ({"input": "a", "dimensions": 5}, "dimensions"),
        ({"input": "a", "dimensions": 0}, "dimensions"),
        ({"input": "a", "pooling": "max"}, "pooling"),
        ({"input": "a", "encoding_format": "hex"}, "encoding_format"),
        ({"input": "a" * 600}, "input"),
        ({"input": [300]}, "input"),
        ({"input": "a", "priority": 2**40}, "priority"),
        ({}, "input"),
    ],
)
async def test_refusals(fields, param):
    response = await rig().post("/v1/embeddings", {"model": "tiny", **fields})
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param


async def test_truncation():
    one = rig()
    assert (await embed(one, "x" * 600, truncate_prompt_tokens=-1)).status_code == 200
    assert (await embed(one, "abc", truncate_prompt_tokens=2)).status_code == 200
    assert [len(request.prompt_token_ids) for request in one.generator.requests] == [512, 2]


async def test_the_official_client():
    one = rig()
    async with one.http() as http:
        client = openai.AsyncOpenAI(api_key="x", base_url="http://test/v1", http_client=http)
        answer = await client.embeddings.create(model="tiny", input=["ab", "b"])
    assert [len(entry.embedding) for entry in answer.data] == [4, 4]
    np.testing.assert_allclose(np.linalg.norm(answer.data[1].embedding), 1, rtol=1e-6)
