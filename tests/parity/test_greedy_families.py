"""Greedy output equals transformers', family by family, however requests are cached, cut, batched and preempted."""

import pytest
import torch

from warmroot.actors.models.loader import load_model

from .conftest import FAMILIES
from .greedy_harness import GreedyEngine, reference_greedy

MAX_TOKENS = 24


def random_tokens(seed: int, length: int) -> list[int]:
    return torch.randint(4, 256, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


SHARED = random_tokens(0, 21)
PROMPTS = [
    random_tokens(1, 1),
    random_tokens(2, 5),
    SHARED + random_tokens(3, 9),
    SHARED + random_tokens(4, 30),
    SHARED[:18] + random_tokens(5, 3),
    random_tokens(6, 64),
    random_tokens(7, 33),
    SHARED,
]


@pytest.fixture(scope="module", params=FAMILIES)
def reference(request):
    model = FAMILIES[request.param].build()
    if request.param.startswith("gemma"):
        # Its tied, scaled embedding would make each token predict itself, whatever attention says.
        model.get_input_embeddings().weight.data *= 0.1
    return model


@pytest.fixture(scope="module")
def decoder(reference, tmp_path_factory):
    folder = tmp_path_factory.mktemp("greedy")
    reference.save_pretrained(folder)
    return load_model(folder, dtype="float32", device=torch.device("cpu"))


@pytest.fixture(scope="module")
def expected(reference, decoder) -> list[list[int]]:
    return reference_greedy(reference, PROMPTS, MAX_TOKENS, decoder.spec.eos_token_ids)


def num_blocks_for_one(decoder) -> int:
    """Pages for the longest sequence alone, and a few more."""
    groups = len(GreedyEngine(decoder).runner.layout.groups)
    return 1 + groups * (-(-(64 + MAX_TOKENS) // 4) + 3)


def test_reference_says_something(expected):
    assert len({token for output in expected for token in output}) > 20


def test_all_at_once_then_from_the_cache(decoder, expected):
    engine = GreedyEngine(decoder, options={"max_num_seqs": 16})
    assert engine.generate(PROMPTS, MAX_TOKENS) == expected
    before = dict(engine.cached_tokens)
    assert engine.generate(PROMPTS, MAX_TOKENS) == expected
    found = [engine.cached_tokens[f"2-{index}"] for index in range(len(PROMPTS))]
    # All but the last token, which must run to give logits; less what a page's quarter is too little to copy.
    assert all(cached >= (len(prompt) - 1) // 4 * 4 for cached, prompt in zip(found, PROMPTS, strict=True))
    assert sum(found) > sum(before.values())


def test_next_turn_finds_generated_tokens(decoder, reference, expected):
    engine = GreedyEngine(decoder)
    assert engine.generate(PROMPTS[2:3], MAX_TOKENS) == expected[2:3]
    turn = PROMPTS[2] + expected[2][:-1] + random_tokens(8, 6)
    eos = decoder.spec.eos_token_ids
    assert engine.generate([turn], 12) == reference_greedy(reference, [turn], 12, eos)
    assert engine.cached_tokens["2-0"] >= (len(PROMPTS[2]) + len(expected[2]) - 1) // 4 * 4 - 4


@pytest.mark.parametrize("budget", [7, 16])
def test_chunked_prefill(decoder, expected, budget):
    options = {"max_num_seqs": 7, "max_num_batched_tokens": budget}
    engine = GreedyEngine(decoder, options=options)
    assert engine.generate(PROMPTS, MAX_TOKENS) == expected
    assert max(plan.num_tokens for plan in engine.runner.plans) <= budget


@pytest.mark.parametrize("caching", [True, False])
def test_preemption(decoder, expected, caching):
    options = {"max_num_seqs": 16, "max_num_batched_tokens": 48, "enable_prefix_caching": caching}
    engine = GreedyEngine(decoder, num_blocks=num_blocks_for_one(decoder), options=options)
    assert engine.generate(PROMPTS, MAX_TOKENS) == expected
    assert caching or engine.runner.num_restarts > 0


def test_one_at_a_time(decoder, expected):
    engine = GreedyEngine(decoder, options={"max_num_seqs": 1})
    assert engine.generate(PROMPTS, MAX_TOKENS) == expected
    assert max(len(plan.sequences) for plan in engine.runner.plans) == 1


def test_resumed_elsewhere(decoder, expected):
    """prompt + tokens already delivered continue as if nothing had happened."""
    engine = GreedyEngine(decoder)
    rest = engine.generate([PROMPTS[2] + expected[2][:10]], len(expected[2]) - 10)
    assert rest == [expected[2][10:]]
