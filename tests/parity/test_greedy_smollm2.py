"""Greedy output of SmolLM2 in float32 equals transformers': 64 tokens after 20 varied prompts."""

import pytest
import torch

from warmroot.actors.models.loader import load_model
from warmroot.router.tokenizer import Tokenizer

from .greedy_harness import GreedyEngine, explain_difference, reference_greedy

pytestmark = pytest.mark.model
MAX_TOKENS = 64
SYSTEM = (
    "<|im_start|>system\nYou are a careful assistant that answers briefly and never invents facts.<|im_end|>\n"
    "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
)
TEXTS = [
    "The capital of France is",
    "Water boils at",
    "Once upon a time, in a village by the sea,",
    "def fibonacci(n):\n    ",
    "import numpy as np\n\nx = np.arange(10)\n",
    "SELECT name, COUNT(*) FROM orders WHERE",
    "La Révolution française a commencé en",
    "Der schnellste Weg von Berlin nach München ist",
    "1, 1, 2, 3, 5, 8, 13, 21,",
    "Q: What is 17 + 25?\nA:",
    "Dear Sir or Madam,\n\nI am writing to complain about",
    "<html>\n<body>\n<h1>",
    '{"name": "Ada", "age":',
    "The mitochondrion is the",
    "Roses are red,\nviolets are blue,\n",
    "In 1969, Neil Armstrong",
    SYSTEM.format("Why is the sky blue?"),
    SYSTEM.format("Name three rivers in Europe."),
    SYSTEM.format("Write a haiku about autumn."),
    "The quick brown fox jumps over the lazy dog. " * 12,
]


@pytest.fixture(scope="module")
def prompts(smollm2_path) -> list[list[int]]:
    tokenizer = Tokenizer.from_path(smollm2_path)
    return [tokenizer.encode(text) for text in TEXTS]


@pytest.fixture(scope="module")
def decoder(smollm2_path):
    return load_model(smollm2_path, dtype="float32", device=torch.device("cpu"))


@pytest.fixture(scope="module")
def expected(smollm2_reference, decoder, prompts):
    return reference_greedy(smollm2_reference, prompts, MAX_TOKENS, decoder.spec.eos_token_ids, batched=True)


@pytest.fixture(scope="module")
def check(smollm2_reference, prompts, expected):
    def check(found: list[list[int]], chosen: list[int] | None = None) -> None:
        chosen = list(range(len(prompts))) if chosen is None else chosen
        wrong = {
            TEXTS[index][:40]: explain_difference(smollm2_reference, prompts[index], expected[index], output)
            for index, output in zip(chosen, found, strict=True)
            if output != expected[index]
        }
        assert not wrong

    return check


def test_batch_of_16_then_from_the_cache(decoder, prompts, check):
    engine = GreedyEngine(decoder, block_size=16, options={"max_num_seqs": 16})
    check(engine.generate(prompts, MAX_TOKENS))
    chosen = [0, 16, 17, 18, 19]
    check(engine.generate([prompts[index] for index in chosen], MAX_TOKENS), chosen)
    assert all(engine.cached_tokens[f"2-{i}"] >= (len(prompts[c]) - 1) // 16 * 16 for i, c in enumerate(chosen))


def test_chunked_prefill_and_preemption(decoder, prompts, check):
    chosen = [3, 6, 12, 16, 19]
    options = {"max_num_seqs": 16, "max_num_batched_tokens": 16, "enable_prefix_caching": False}
    engine = GreedyEngine(decoder, block_size=16, num_blocks=1 + 16, options=options)
    check(engine.generate([prompts[index] for index in chosen], MAX_TOKENS), chosen)
    assert engine.runner.num_restarts > 0


@pytest.mark.slow
@pytest.mark.parametrize("budget", [7, 16])
def test_chunked_prefill(decoder, prompts, check, budget):
    options = {"max_num_seqs": 7, "max_num_batched_tokens": budget}
    check(GreedyEngine(decoder, block_size=16, options=options).generate(prompts, MAX_TOKENS))


@pytest.mark.slow
def test_one_at_a_time(decoder, prompts, check):
    check(GreedyEngine(decoder, block_size=16, options={"max_num_seqs": 1}).generate(prompts, MAX_TOKENS))


@pytest.mark.slow
def test_preemption(decoder, prompts, check):
    engine = GreedyEngine(decoder, block_size=16, num_blocks=1 + 20, options={"max_num_seqs": 16})
    check(engine.generate(prompts, MAX_TOKENS))
    assert engine.runner.num_restarts > 0


@pytest.mark.slow
def test_reference_prompt_by_prompt(smollm2_reference, decoder, prompts, expected):
    assert expected == reference_greedy(smollm2_reference, prompts, MAX_TOKENS, decoder.spec.eos_token_ids)
