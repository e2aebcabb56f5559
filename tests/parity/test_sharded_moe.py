"""Models with experts against transformers, whole and cut over ranks."""

import pytest
import torch
import transformers

from warmroot.actors.models.loader import load_model
from warmroot.cluster.topology import Topology

from .conftest import PagedSequences
from .greedy_harness import GreedyEngine, reference_greedy
from .sharded_harness import ThreadedGang, greedy_engine
from .sparse_families import FAMILIES

CUTS = {
    "tp4": (Topology(tp=4), 0),  # KV heads on two ranks each
    "tp2": (Topology(tp=2), 0),
    "pp2": (Topology(pp=2), 0),
    "tp2-ep2": (Topology(tp=2, ep=2), 0),
    "tp2-ep2-copies": (Topology(tp=2, ep=2), 2),
    "tp2-pp2-ep2": (Topology(tp=2, pp=2, ep=2), 0),
}
PROMPTS = [
    torch.randint(4, 256, (length,), generator=torch.Generator().manual_seed(length)).tolist() for length in (23, 5, 40)
]


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request, tmp_path_factory):
    path = tmp_path_factory.mktemp(request.param)
    FAMILIES[request.param].build().save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def reference(folder):
    # Read back, so that what is compared is what the files say.
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    return model.eval()


@pytest.fixture(scope="module")
def expected(reference, whole):
    return reference_greedy(reference, PROMPTS, 16, whole.spec.eos_token_ids)


@pytest.fixture(scope="module")
def whole(folder):
    return load_model(folder, dtype="float32", device=torch.device("cpu"))


@torch.no_grad()
def test_logits_are_those_of_transformers(whole, reference):
    found = PagedSequences(whole).step(dict(enumerate(PROMPTS)))
    for index, prompt in enumerate(PROMPTS):
        torch.testing.assert_close(found[index], reference(torch.tensor([prompt])).logits[0], atol=1e-3, rtol=1e-4)


def test_greedy_tokens_of_the_whole_model(whole, expected):
    assert GreedyEngine(whole).generate(PROMPTS, 16) == expected


@pytest.mark.parametrize("cut", CUTS)
def test_greedy_tokens_of_ranks(folder, expected, cut):
    topology, copies = CUTS[cut]
    gang = ThreadedGang(folder, topology, num_redundant_experts=copies, dtype="float32")
    engine = greedy_engine(gang, 200, {"max_num_seqs": 4, "max_num_batched_tokens": 24})
    assert engine.generate(PROMPTS, 16) == expected
    assert engine.generate(PROMPTS, 16) == expected  # from the cache
