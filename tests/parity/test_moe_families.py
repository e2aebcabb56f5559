"""Models with experts against transformers, however the tokens are cut into steps, cached and preempted."""

from itertools import pairwise

import pytest
import torch
import transformers

from warmroot.actors.kernels.library import native
from warmroot.actors.models.loader import load_model
from warmroot.actors.runner.load import KvMemoryConfig, load_runner
from warmroot.actors.runner.memory import page_bytes

from .conftest import PagedSequences
from .greedy_harness import GreedyEngine, reference_greedy
from .sparse_families import FAMILIES, VARIANTS

MAX_TOKENS = 16


def random_tokens(seed: int, length: int) -> list[int]:
    return torch.randint(4, 256, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


SHARED = random_tokens(0, 21)
PROMPTS = [
    random_tokens(1, 1),
    SHARED + random_tokens(3, 9),
    SHARED + random_tokens(4, 30),
    SHARED[:18] + random_tokens(5, 3),
    random_tokens(6, 64),
    SHARED,
]


@pytest.fixture(scope="module", params=FAMILIES | VARIANTS)
def folder(request, tmp_path_factory):
    path = tmp_path_factory.mktemp(request.param)
    (FAMILIES | VARIANTS)[request.param].build().save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def reference(folder):
    # Read back, so that what is compared is what the files say.
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    return model.eval()


@pytest.fixture(scope="module")
def decoder(folder):
    return load_model(folder, dtype="float32", device=torch.device("cpu"))


@pytest.fixture(scope="module")
def expected(reference, decoder):
    return reference_greedy(reference, PROMPTS, MAX_TOKENS, decoder.spec.eos_token_ids)


@torch.no_grad()
def test_logits_of_chunks_and_decodes(decoder, reference):
    sequences = PagedSequences(decoder)
    longer, shorter = PROMPTS[4], PROMPTS[1]
    found = [[], []]
    for (a, b), (c, d) in zip(pairwise([0, 40, 41, 55, 64]), pairwise([0, 5, 28, 29, 30]), strict=True):
        for index, logits in sequences.step({0: longer[a:b], 1: shorter[c:d]}).items():
            found[index].append(logits)
    for logits, tokens in zip(found, (longer, shorter), strict=True):
        expected = reference(torch.tensor([tokens])).logits[0]
        assert expected.std() > 0.5  # a reference that says nothing would agree with anything
        torch.testing.assert_close(torch.cat(logits), expected, atol=1e-3, rtol=0)


def test_pages_fill_the_memory(folder, decoder):
    runner = load_runner(folder, kv=KvMemoryConfig(kv_cache_memory=2**20))
    allocated = sum(pages.nbytes for pages in (*runner._kv.keys, *runner._kv.values))
    size = page_bytes(decoder.spec, runner.layout, runner.kv_dtype)
    assert allocated == runner.num_blocks * size
    assert 2**20 - size < allocated <= 2**20
    assert runner.kv_dtype == (torch.float32 if native() is None else torch.float16)


def test_reference_says_something(expected):
    assert len({token for output in expected for token in output}) > 20


def test_all_at_once_then_from_the_cache(decoder, expected):
    engine = GreedyEngine(decoder, options={"max_num_seqs": 16})
    assert engine.generate(PROMPTS, MAX_TOKENS) == expected
    before = sum(engine.cached_tokens.values())
    assert engine.generate(PROMPTS, MAX_TOKENS) == expected
    assert sum(engine.cached_tokens.values()) - before > sum(map(len, PROMPTS)) - 5 * len(PROMPTS)


def test_chunks_and_preemption(decoder, expected):
    groups = len(GreedyEngine(decoder).runner.layout.groups)
    options = {"max_num_seqs": 16, "max_num_batched_tokens": 24, "enable_prefix_caching": False}
    engine = GreedyEngine(decoder, num_blocks=1 + groups * (-(-(64 + MAX_TOKENS) // 4) + 3), options=options)
    assert engine.generate(PROMPTS, MAX_TOKENS) == expected
    assert engine.runner.num_restarts > 0 or any(decoder.spec.layer_windows)  # windows give pages back
    assert max(plan.num_tokens for plan in engine.runner.plans) <= 24
