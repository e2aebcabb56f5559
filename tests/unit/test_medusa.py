"""Medusa heads and trees on a small model: the same output as without, however good or bad the guesses are."""

import math

import pytest
import torch
from medusa_harness import (
    HIDDEN,
    VOCAB,
    fitted_outputs,
    make_engine,
    medusa,
    run,
    save_heads,
    save_model,
    texts_of,
    tokens,
)
from safetensors.torch import load_file
from sampled_requests import PARAMS, PROMPT, requests_with

from warmroot.actors.engine.draft_tree import Draft, depths
from warmroot.actors.kernels.library import native
from warmroot.actors.kernels.linear import NativeLinear, WeightFormat
from warmroot.actors.layers.linear import DenseMethod
from warmroot.actors.models import medusa as medusa_heads
from warmroot.actors.models.loader import load_model
from warmroot.actors.models.medusa import load_heads
from warmroot.actors.runner.tree import best_tree
from warmroot.cluster.errors import ConfigError, ModelLoadError
from warmroot.cluster.kv_formats import KV_FORMATS

CPU = torch.device("cpu")
REQUESTS = requests_with(PARAMS)
GREEDY = {
    f"g{index}": ([*PROMPT[: 3 + index % 7], 3 + index], {"temperature": 0.0, "max_tokens": 50, "ignore_eos": True})
    for index in range(16)
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    return folder, save_model(folder)


@pytest.fixture(scope="module")
def decoder(model):
    return load_model(model[0], dtype="float32", device=CPU)


@pytest.fixture(scope="module")
def heads(model, tmp_path_factory):
    """Often right, at several depths."""
    return save_heads(tmp_path_factory.mktemp("heads"), fitted_outputs(model[1], texts_of(model[1]), 4))


@pytest.fixture(scope="module")
def bad_heads(tmp_path_factory):
    """Random ones."""
    outputs = [torch.randn(VOCAB, HIDDEN, generator=torch.Generator().manual_seed(9))] * 3
    return save_heads(tmp_path_factory.mktemp("bad"), outputs, shared=True, blocks=0.3)


def accepted(engine) -> list[int]:
    return engine.speculator.counts.accepted_by_place


@pytest.mark.parametrize("tree", [None, [4, 2, 1], [1, 1, 1, 1]])
@pytest.mark.parametrize("streams", [1, 16])
def test_greedy_output_is_the_same(decoder, heads, tree, streams):
    requests = dict(list(GREEDY.items())[:streams])
    plain = tokens(run(make_engine(decoder, None), requests))
    engine = make_engine(decoder, medusa(heads, 12, tree=tree))
    assert tokens(run(engine, requests)) == plain
    assert tokens(run(engine, requests)) == plain, "with cached prefixes"
    assert len(accepted(engine)) >= 3 and accepted(engine)[2] > 5 * streams


@pytest.mark.parametrize(
    "options", [{}, {"num_blocks": 60}, {"max_num_batched_tokens": 40}, {"enable_prefix_caching": False}]
)
@pytest.mark.parametrize("good", [True, False])
def test_whatever_is_asked_for_trees_change_nothing(decoder, heads, bad_heads, options, good):
    plain = run(make_engine(decoder, None, **options), REQUESTS)
    engine = make_engine(decoder, medusa(heads if good else bad_heads), **options)
    for _ in range(2):
        found = run(engine, REQUESTS)
        assert tokens(found) == tokens(plain)
        assert [own[-1].finish_reason for own in found.values()] == [own[-1].finish_reason for own in plain.values()]
    assert engine.speculator.counts.draft_tokens > 300
    assert sum(accepted(engine)) > (80 if good else 10)
    ours, theirs = ([e for d in deltas["logprobs"] for e in d.logprobs] for deltas in (found, plain))
    for one, other in zip(ours, theirs, strict=True):
        assert (one.token_id, one.rank) == (other.token_id, other.rank)
        assert one.logprob == pytest.approx(other.logprob, abs=1e-4)


def test_adaptive_trees_change_nothing(decoder, heads):
    plain = tokens(run(make_engine(decoder, None), REQUESTS | GREEDY))
    engine = make_engine(decoder, medusa(heads, 12, adaptive=True))
    assert tokens(run(engine, REQUESTS | GREEDY)) == plain


def test_only_accepted_tokens_are_cached(decoder, heads):
    """What another request finds in the cache is what it would have computed: also where a branch was rejected."""
    first = {"a": (PROMPT, {"temperature": 0.8, "seed": 3, "max_tokens": 60, "ignore_eos": True})}
    engine = make_engine(decoder, medusa(heads))
    text = PROMPT + tokens(run(engine, first))["a"]
    ask = {"b": (text, {"temperature": 0.0, "max_tokens": 1, "logprobs": 5})}
    found = run(engine, ask)["b"][0]
    assert found.cached_tokens >= len(text) - 6
    fresh = run(make_engine(decoder, None), ask)["b"][0]
    assert found.logprobs[0].logprob == pytest.approx(fresh.logprobs[0].logprob, abs=1e-5)


@pytest.mark.parametrize("name", ["int8", "int4", "k8v4"])
def test_quantised_pages_take_chains(decoder, heads, name):
    options = {"kv_dtype": KV_FORMATS[name], "block_size": 16}
    plain = tokens(run(make_engine(decoder, None, **options), GREEDY))
    engine = make_engine(decoder, medusa(heads), **options)
    assert tokens(run(engine, GREEDY)) == plain
    assert len(accepted(engine)) == 4 >= engine.speculator.counts.draft_tokens / engine.speculator.counts.drafts


def test_fp8_pages_take_trees(decoder, heads):
    """Also behind cached prefixes that end within a block, and when there are too few pages for all."""
    options = {"kv_dtype": KV_FORMATS["fp8"]}
    plain = tokens(run(make_engine(decoder, None, **options), GREEDY))
    for more in ({}, {"num_blocks": 60}):
        engine = make_engine(decoder, medusa(heads), **options, **more)
        assert tokens(run(engine, GREEDY)) == plain
        assert tokens(run(engine, GREEDY)) == plain, "with cached prefixes"
        assert engine.speculator.counts.draft_tokens / engine.speculator.counts.drafts > 4


def test_windows(tmp_path):
    """Trees over layers of which some see only a few tokens."""
    config = {"sliding_window": 5, "use_sliding_window": True, "max_window_layers": 1}
    network = save_model(tmp_path / "model", "Qwen2ForCausalLM", **config)
    decoder = load_model(tmp_path / "model", dtype="float32", device=CPU)
    assert 5 in decoder.spec.layer_windows and None in decoder.spec.layer_windows
    folder = save_heads(tmp_path / "heads", fitted_outputs(network, texts_of(network), 4))
    plain = tokens(run(make_engine(decoder, None), GREEDY))
    engine = make_engine(decoder, medusa(folder, 10))
    assert tokens(run(engine, GREEDY)) == plain
    assert sum(accepted(engine)) > 100


def test_typical_acceptance_takes_longer_paths(decoder, heads):
    requests = {f"r{seed}": (PROMPT, {"seed": seed, "max_tokens": 40, "ignore_eos": True}) for seed in range(8)}
    rates = []
    for threshold in (None, 0.02):
        engine = make_engine(decoder, medusa(heads, acceptance_threshold=threshold))
        run(engine, requests)
        rates.append(sum(accepted(engine)) / engine.speculator.counts.drafts)
    assert rates[1] > 1.3 * rates[0]


@pytest.mark.slow
def test_sampling_is_distributed_as_without(decoder, heads):
    """21,000 third tokens of one prompt, with trees and without: two samples of one distribution."""
    params = {"temperature": 1.2, "top_p": 0.95, "max_tokens": 3, "ignore_eos": True, "logit_bias": {7: 1.0}}
    counts = []
    for speculation, first_seed in ((medusa(heads, 6), 0), (None, 10**6)):
        engine = make_engine(decoder, speculation, max_num_seqs=256, max_num_batched_tokens=4096, num_blocks=2000)
        seen = torch.zeros(VOCAB)
        for batch in range(30):
            seeds = range(first_seed + 700 * batch, first_seed + 700 * (batch + 1))
            for output in tokens(run(engine, {str(s): (PROMPT, params | {"seed": s}) for s in seeds})).values():
                seen[output[2]] += 1
        counts.append(seen)
        if speculation is not None:
            assert 0 < sum(accepted(engine)) < engine.speculator.counts.draft_tokens
    ours, theirs = counts
    likely = ours + theirs >= 20
    statistic = ((ours - theirs)[likely] ** 2 / (ours + theirs)[likely]).sum()
    # Of up to 23 degrees of freedom a statistic above 2.3 of each comes less than once in a thousand times.
    assert likely.sum() > 10 and float(statistic) / (int(likely.sum()) - 1) < 2.3


def test_the_best_tree_has_the_most_probable_nodes():
    token_ids = [[1, 2, 3], [4, 5, 6], [7, 8, 9]]
    probabilities = [[0.6, 0.3, 0.05], [0.5, 0.2, 0.1], [0.9, 0.05, 0.01]]
    logprobs = [[math.log(p) for p in own] for own in probabilities]
    draft = best_tree(token_ids, logprobs, 7)
    # 0.6, then 0.3 both as a child and beside it, 0.27, then 0.15 beside the branch and 0.135, 0.12
    assert sorted(draft.token_ids) == sorted((1, 4, 2, 7, 4, 7, 5))
    found = []
    for node, depth in enumerate(depths(draft.parents)):
        branch = draft.branch(node)
        assert len(branch) == depth
        found.append(math.prod(probabilities[at][token_ids[at].index(token)] for at, token in enumerate(branch)))
    assert found == sorted(found, reverse=True) and found[-1] == pytest.approx(0.12)
    assert len(best_tree(token_ids, logprobs, 7, 0.2)) == 4 and not best_tree(token_ids, logprobs, 7, 0.7)


def test_a_tree_without_branches_is_a_chain():
    assert best_tree([[1], [2], [3]], [[-1.0], [-1.0], [-1.0]], 5) == Draft((1, 2, 3))
    assert best_tree([[1, 2]], [[-1.0, -2.0]], 5) == Draft((1, 2), (-1, -1))


@pytest.fixture
def exact(monkeypatch):
    """Heads as they are stored."""
    monkeypatch.setattr(medusa_heads, "head_method", lambda decoder, *_: DenseMethod(torch.float32, CPU))


def test_heads_over_some_tokens(model, decoder, exact, tmp_path):
    token_map = [3, 4, 5, 7, 9, 11, 12, 20]
    outputs = fitted_outputs(model[1], texts_of(model[1]), 4)
    folder = save_heads(tmp_path, outputs, token_map=token_map)
    hidden = torch.randn(3, HIDDEN)
    found, scores = load_heads(folder, decoder).guesses(hidden, 5)
    expected = torch.stack([hidden @ weight[token_map].T for weight in outputs], 1)
    assert set(found.flatten().tolist()) <= set(token_map)
    assert torch.equal(found, torch.tensor(token_map)[expected.topk(5).indices])
    torch.testing.assert_close(scores, expected.log_softmax(-1).topk(5).values, atol=1e-4, rtol=1e-4)
    plain = tokens(run(make_engine(decoder, None), GREEDY))
    assert tokens(run(make_engine(decoder, medusa(folder)), GREEDY)) == plain


def test_heads_are_what_the_paper_says(decoder, bad_heads, exact):
    tensors = load_file(bad_heads / "model.safetensors")
    hidden = torch.randn(2, HIDDEN)
    found, scores = load_heads(bad_heads, decoder).guesses(hidden, 3)
    for head in range(3):
        inner = hidden @ tensors[f"blocks.{head}.layers.0.weight"].T + tensors[f"blocks.{head}.layers.0.bias"]
        logits = (hidden + torch.nn.functional.silu(inner)) @ tensors["lm_head.weight"].T
        values, places = logits.log_softmax(-1).topk(3)
        assert torch.equal(found[:, head], places)
        torch.testing.assert_close(scores[:, head], values, atol=1e-4, rtol=1e-4)


@pytest.mark.skipif(native() is None, reason="the native kernels were not built")
def test_heads_in_8_bits_guess_about_the_same(decoder, heads, exact, monkeypatch):
    hidden = torch.randn(200, HIDDEN)
    whole = load_heads(heads, decoder).guesses(hidden, 1)
    monkeypatch.undo()
    packed = load_heads(heads, decoder)
    assert isinstance(packed.blocks, NativeLinear) and packed.blocks.parts[0].format is WeightFormat.Q8
    found = packed.guesses(hidden, 1)
    assert (found[0] == whole[0]).float().mean() > 0.97
    assert (found[1] - whole[1]).abs().mean() < 0.1


def test_heads_that_do_not_fit(decoder, tmp_path):
    outputs = [torch.zeros(VOCAB, HIDDEN), torch.ones(VOCAB, HIDDEN)]
    with pytest.raises(ModelLoadError, match="no heads in config"):
        load_heads(tmp_path / "nothing", decoder)
    with pytest.raises(ConfigError, match="vocab_size 99"):
        load_heads(save_heads(tmp_path / "a", outputs, vocab_size=99), decoder)
    with pytest.raises(ModelLoadError, match="expected model_type medusa"):
        load_heads(save_heads(tmp_path / "b", outputs, num_hidden_layers=2), decoder)
    with pytest.raises(ModelLoadError, match=r"blocks.2.layers.0.weight is missing, expected \[32, 32\]"):
        load_heads(save_heads(tmp_path / "c", outputs, num_heads=3), decoder)
