"""Embeddings of SmolLM2 in float32 are what transformers' last hidden states give."""

import numpy as np
import pytest
import torch

from warmroot import LLM, SamplingParams

pytestmark = pytest.mark.model
TEXTS = [
    "Paris",
    "The capital of France is",
    "The quick brown fox jumps over the lazy dog. " * 12,
    "def fibonacci(n):\n    return n if n < 2 else fibonacci(n - 1) + fibonacci(n - 2)\n" * 4,
]
LAYOUTS = {"one": {}, "tp 2": {"tensor_parallel_size": 2}, "pp 2": {"pipeline_parallel_size": 2}}


@pytest.fixture(scope="module", params=["one", "pp 2", pytest.param("tp 2", marks=pytest.mark.slow)])
def llm(request):
    """Prompts are computed in chunks of 48 tokens."""
    keys = {"dtype": "float32", "max_num_batched_tokens": 48, "max_num_seqs": 8, "num_kv_blocks": 200}
    with LLM("smollm2", num_threads=2, progress=False, **keys, **LAYOUTS[request.param]) as llm:
        yield llm


@pytest.fixture(scope="module")
def hidden(smollm2_reference):
    """[tokens, hidden] of a prompt, behind the final norm."""

    def hidden(token_ids: list[int]) -> np.ndarray:
        with torch.inference_mode():
            return smollm2_reference.model(torch.tensor([token_ids])).last_hidden_state[0].numpy()

    return hidden


def embed(llm: LLM, texts: list[str], pooling: str) -> list[tuple[np.ndarray, int]]:
    """(vector, cached tokens) of each."""
    outputs = llm.generate(texts, SamplingParams(max_tokens=0, pooling=pooling))
    assert [output.num_output_tokens for output in outputs] == [0] * len(texts)
    return [(np.frombuffer(output.embedding, "<f4"), output.cached_tokens) for output in outputs]


def check(found: np.ndarray, expected: np.ndarray) -> None:
    assert found.shape == expected.shape
    np.testing.assert_allclose(found, expected, atol=2e-3 * np.abs(expected).max())


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_vectors(llm, hidden, pooling):
    for text, (vector, _) in zip(TEXTS, embed(llm, TEXTS, pooling), strict=True):
        states = hidden(llm.frontend.tokenize(text))
        check(vector, states[-1] if pooling == "last" else states.mean(0))


def test_the_last_state_is_had_from_the_cache_and_the_mean_is_not(llm, hidden):
    text = "Once upon a time, in a village by the sea, there lived a fisherman who could not swim at all. " * 2
    states = hidden(llm.frontend.tokenize(text))
    for pooling, from_cache in (("mean", False), ("last", True), ("mean", False)):
        [(vector, cached)] = embed(llm, [text], pooling)
        assert (cached > 0) == from_cache
        check(vector, states[-1] if pooling == "last" else states.mean(0))


def test_embeddings_beside_generation(llm, hidden):
    outputs = llm.generate(
        [TEXTS[1], TEXTS[2]],
        [SamplingParams(max_tokens=6, temperature=0), SamplingParams(max_tokens=0, pooling="mean")],
    )
    assert len(outputs[0].completions[0].token_ids) == 6
    assert outputs[0].embedding is None
    check(np.frombuffer(outputs[1].embedding, "<f4"), hidden(llm.frontend.tokenize(TEXTS[2])).mean(0))
