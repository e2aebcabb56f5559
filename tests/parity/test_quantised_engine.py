"""Quantised KV in the engine: chunks, cache hits, preemption and ranks give what one undisturbed process gives."""

import pytest

from warmroot.actors.runner.load import KvMemoryConfig, load_runner
from warmroot.cluster.ids import RequestId
from warmroot.cluster.kv_formats import KV_FORMATS
from warmroot.cluster.messages import GenerateRequest
from warmroot.cluster.sampling_params import SamplingParams
from warmroot.cluster.speculative_config import SpeculativeConfig
from warmroot.cluster.topology import Topology

from .conftest import Family
from .sharded_gang import BLOCK_SIZE, Served, assert_equal, load, random_tokens, served_by_gang, served_by_one

FORMATS = ("fp8", "int8", "int4", "k8v4")
PAGES = 25
ATOL = 2e-3
"""Sums are added up in another order, and a code between two steps may then fall to the other side."""


def sharing(fmt):
    """What the engine shares of blocks in that format."""
    return {"share_partial_blocks": not KV_FORMATS[fmt].quantises_blocks}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("llama")
    sizes = {"hidden_size": 128, "intermediate_size": 192, "num_attention_heads": 4, "num_key_value_heads": 2}
    Family("LlamaForCausalLM", sizes).build().save_pretrained(path)
    return path


@pytest.mark.parametrize("fmt", FORMATS)
def test_cache_hits_chunks_and_preemption_change_nothing(folder, fmt):
    expected = served_by_one(folder, kv_cache_dtype=fmt, **sharing(fmt)).run(load())
    kv = KvMemoryConfig(block_size=BLOCK_SIZE, num_kv_blocks=PAGES, kv_cache_dtype=fmt)
    runner = load_runner(folder, dtype="float32", quantization="none", kv=kv)
    served = Served(runner, **sharing(fmt))
    assert_equal(served.run(load()), expected, atol=ATOL)
    again = served.run(load())
    assert_equal(again, expected, atol=ATOL)
    assert sum(outcome.cached for outcome in again.values()) > 0


@pytest.mark.parametrize("fmt", ["fp8", "k8v4"])
def test_stages_give_the_same(folder, fmt):
    expected = served_by_one(folder, kv_cache_dtype=fmt, **sharing(fmt)).run(load())
    with served_by_gang(folder, Topology(pp=2), PAGES, kv_cache_dtype=fmt, **sharing(fmt)) as served:
        assert_equal(served.run(load()), expected, atol=ATOL)


def text() -> list[GenerateRequest]:
    """Given tokens, whose log-probabilities are asked for: so that a difference has no consequences."""
    params = SamplingParams(max_tokens=0, prompt_logprobs=0)
    return [GenerateRequest(request_id=RequestId("text"), prompt_token_ids=random_tokens(0, 90), params=params)]


def mean_difference(found, expected):
    pairs = list(zip(found["text"].prompt_logprobs[1:], expected["text"].prompt_logprobs[1:], strict=True))
    return sum(abs(mine.logprob - theirs.logprob) for mine, theirs in pairs) / len(pairs)


@pytest.mark.parametrize("fmt", ["fp8", "int4"])
def test_ranks_that_sum_differ_by_less_than_the_format_does(folder, fmt):
    """They add up in another order, and here and there a code between two steps falls to the other side."""
    exact = served_by_one(folder, kv_cache_dtype="fp32").run(text())
    expected = served_by_one(folder, kv_cache_dtype=fmt, **sharing(fmt)).run(text())
    with served_by_gang(folder, Topology(tp=2), PAGES, kv_cache_dtype=fmt, **sharing(fmt)) as served:
        assert mean_difference(served.run(text()), expected) <= 0.2 * mean_difference(expected, exact)
        first = served.run(load())
        assert_equal(served.run(load()), first, atol=ATOL)


@pytest.mark.parametrize("fmt", FORMATS)
def test_rejected_drafts_change_nothing(folder, fmt):
    """Drafts that are rarely right, over the ends of blocks."""
    expected = served_by_one(folder, kv_cache_dtype=fmt, **sharing(fmt)).run(load())
    kv = KvMemoryConfig(block_size=BLOCK_SIZE, num_kv_blocks=4 * PAGES, kv_cache_dtype=fmt)
    runner = load_runner(folder, dtype="float32", quantization="none", kv=kv)
    speculation = SpeculativeConfig(
        method="ngram", num_speculative_tokens=5, prompt_lookup_min=1, adaptive=False, verification="coupled"
    )
    assert_equal(Served(runner, speculation=speculation, **sharing(fmt)).run(load()), expected, atol=ATOL)
