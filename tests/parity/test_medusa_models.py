"""Medusa's trees over real models: every family, every cut over ranks, and SmolLM2 give what they give without."""

import pytest
import torch
import transformers
from medusa_harness import fitted_outputs, make_engine, medusa, run, save_heads, tokens

from warmroot.actors.models.loader import load_model
from warmroot.cluster.topology import Topology
from warmroot.router.tokenizer import Tokenizer

from .sharded_gang import ROUNDING, assert_equal, load, served_by_gang, served_by_one
from .test_speculation_ranks import LLAMA, MIXTRAL

MAX_TOKENS = 30


def random_tokens(seed: int, length: int) -> list[int]:
    return torch.randint(4, 256, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


SHARED = random_tokens(0, 21)
PROMPTS = [random_tokens(1, 2), SHARED + random_tokens(3, 9), SHARED[:18] + random_tokens(5, 3), SHARED]
GREEDY = {"temperature": 0.0, "max_tokens": MAX_TOKENS, "ignore_eos": True}
REQUESTS = {str(index): (prompt, GREEDY) for index, prompt in enumerate(PROMPTS)}
LEAST_ACCEPTED = 20


def test_families(family_decoder, family_reference, tmp_path):
    """With heads that know these very texts; few pages, so that sequences are preempted with a tree behind them."""
    plain = tokens(run(make_engine(family_decoder, None), REQUESTS))
    texts = [prompt + plain[name] for name, (prompt, _) in REQUESTS.items()]
    folder = save_heads(tmp_path, fitted_outputs(family_reference, texts, 3))
    groups = len(make_engine(family_decoder, None).cache.layout.groups)
    for num_blocks in (400, 1 + groups * 21):
        engine = make_engine(family_decoder, medusa(folder, 9), num_blocks=num_blocks)
        assert tokens(run(engine, REQUESTS)) == plain
        assert tokens(run(engine, REQUESTS)) == plain, "with cached prefixes"
        counts = engine.speculator.counts
        assert counts.accepted_tokens > LEAST_ACCEPTED and len(counts.accepted_by_place) == 3


CUTS = {
    "tp2": (LLAMA, Topology(tp=2)),
    "pp2": (LLAMA, Topology(pp=2)),
    "experts-ep2": (MIXTRAL, Topology(ep=2)),
    "tp2-pp2": (LLAMA, Topology(tp=2, pp=2)),
}


@pytest.mark.parametrize("cut", ["tp2", "pp2", "experts-ep2", pytest.param("tp2-pp2", marks=pytest.mark.slow)])
def test_gangs(cut, tmp_path):
    """The heads are on the ranks that sample; all ranks verify trees and move what was accepted."""
    family, topology = CUTS[cut]
    model = family.build()
    model.save_pretrained(tmp_path / "model")
    expected = served_by_one(tmp_path / "model").run(load())
    texts = [request.prompt_token_ids + expected[request.request_id].tokens for request in load()]
    heads = save_heads(tmp_path / "heads", fitted_outputs(model, [text for text in texts if len(text) > 8], 3))
    options = {"speculation": medusa(heads, 6), "draft_path": heads}
    with served_by_gang(tmp_path / "model", topology, 27, **options) as served:
        assert_equal(served.run(load()), expected, atol=ROUNDING)
        assert served.executor.num_restarts
        assert_equal(served.run(load()), expected, atol=ROUNDING)
        counts = served.engine.load()
        assert sum(counts.accepted_by_place) > LEAST_ACCEPTED
        trees = [step.draft.parents for plan in served.executor.plans for step in plan.sequences]
        assert any(trees)


TEXTS = ["The capital of France is", "def fibonacci(n):\n    ", "One day a small dog went to the forest and"]


@pytest.mark.model
def test_smollm2(smollm2_path, smollm2_reference: transformers.PreTrainedModel, tmp_path):
    decoder = load_model(smollm2_path, dtype="float32", device=torch.device("cpu"))
    tokenizer = Tokenizer.from_path(smollm2_path)
    requests = {text: (tokenizer.encode(text), GREEDY) for text in TEXTS}
    plain = tokens(run(make_engine(decoder, None, block_size=16), requests))
    texts = [prompt + plain[name] for name, (prompt, _) in requests.items()]
    folder = save_heads(tmp_path, fitted_outputs(smollm2_reference, texts, 3))
    engine = make_engine(decoder, medusa(folder, 8), block_size=16)
    assert tokens(run(engine, requests)) == plain
    assert engine.speculator.counts.accepted_tokens > LEAST_ACCEPTED
