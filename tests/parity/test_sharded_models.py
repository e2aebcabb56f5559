"""A model cut over ranks computes what the whole one does: logits and greedy tokens."""

from typing import Any

import pytest
import torch

from warmroot.actors.kernels.library import native
from warmroot.actors.models import loader
from warmroot.actors.models.loader import load_model
from warmroot.cluster.topology import Topology

from .conftest import FAMILIES, PagedSequences
from .greedy_harness import GreedyEngine
from .sharded_harness import ThreadedGang, greedy_engine

TP2, PP2, TP2_PP2 = Topology(tp=2), Topology(pp=2), Topology(tp=2, pp=2)
CPU = torch.device("cpu")


def random_tokens(seed: int, length: int) -> list[int]:
    return torch.randint(4, 256, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


CHUNKS = [
    {0: random_tokens(0, 30), 1: random_tokens(1, 7)},
    {0: random_tokens(2, 1), 1: random_tokens(3, 1), 2: random_tokens(4, 19)},
    {0: random_tokens(5, 1), 1: random_tokens(6, 12), 2: random_tokens(7, 1)},
]


def logits(decoder: Any) -> torch.Tensor:
    """Of all tokens of CHUNKS, one after the other."""
    sequences = PagedSequences(decoder)
    if isinstance(decoder, ThreadedGang):
        sequences.kv = decoder.memory(sequences.layout, 400)
    return torch.cat([torch.cat(list(sequences.step(chunk).values())) for chunk in CHUNKS])


@pytest.mark.parametrize("topology", [TP2, PP2, TP2_PP2], ids=["tp2", "pp2", "tp2-pp2"])
def test_logits_equal_those_of_the_whole_model(family_folder, family_decoder, topology):
    gang = ThreadedGang(family_folder, topology, dtype="float32")
    torch.testing.assert_close(logits(gang), logits(family_decoder), atol=1e-4, rtol=1e-5)


def test_each_layer_has_two_sums_and_the_embedding_one(family_folder):
    gang = ThreadedGang(family_folder, TP2_PP2, dtype="float32")
    logits(gang)
    expected = [2 * decoder.spec.num_layers + decoder.own.has_embedding for decoder in gang.ranks]
    assert [group.num_sums for group in gang.groups] == [len(CHUNKS) * number for number in expected]


def test_kv_heads_are_copied_where_ranks_outnumber_them(tmp_path):
    FAMILIES["llama-dynamic-rope"].build().save_pretrained(tmp_path)  # 4 heads, 2 KV heads
    gang = ThreadedGang(tmp_path, Topology(tp=4), dtype="float32")
    assert [decoder.kv_heads for decoder in gang.ranks] == [1] * 4
    whole = load_model(tmp_path, dtype="float32", device=CPU)
    torch.testing.assert_close(logits(gang), logits(whole), atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("family", ["llama-llama3-rope", "gemma2"])
def test_layers_of_torch_do_the_same(family, tmp_path, monkeypatch):
    monkeypatch.setattr(loader, "_native_linears", lambda: False)
    FAMILIES[family].build().save_pretrained(tmp_path)
    gang = ThreadedGang(tmp_path, TP2_PP2, dtype="float32")
    whole = load_model(tmp_path, dtype="float32", device=CPU)
    torch.testing.assert_close(logits(gang), logits(whole), atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("family", ["llama-yarn-rope", "qwen3", "gemma3"])
@pytest.mark.parametrize("topology", [TP2, TP2_PP2], ids=["tp2", "tp2-pp2"])
def test_greedy_tokens_with_cache_hits_chunks_and_preemption(family, topology, tmp_path):
    model = FAMILIES[family].build()
    if family.startswith("gemma"):
        model.get_input_embeddings().weight.data *= 0.1  # else each token predicts itself
    model.save_pretrained(tmp_path)
    shared = random_tokens(0, 21)
    prompts = [shared + random_tokens(1, 9), random_tokens(2, 64), shared + random_tokens(3, 2), shared, shared[:17]]
    whole = load_model(tmp_path, dtype="float32", device=CPU)
    expected = GreedyEngine(whole).generate(prompts, 16)
    options = {"max_num_seqs": 4, "max_num_batched_tokens": 24}
    groups = len(GreedyEngine(whole).runner.layout.groups)
    for num_blocks in (400, 1 + groups * 26):
        engine = greedy_engine(ThreadedGang(tmp_path, topology, dtype="float32"), num_blocks, options)
        assert engine.generate(prompts, 16) == expected
        assert engine.generate(prompts, 16) == expected
        assert any(engine.cached_tokens.values())


def test_a_rank_holds_its_part_and_nothing_else(family_folder, family_decoder):
    gang = ThreadedGang(family_folder, TP2_PP2, dtype="float32")
    layers = [decoder.own.layers for decoder in gang.ranks]
    assert [*layers[0], *layers[2]] == list(range(family_decoder.spec.num_layers))
    spec = family_decoder.spec
    for stage in gang.topology.stage_groups:
        ranks = [gang.ranks[rank].spec for rank in stage]
        assert sum(rank.num_heads for rank in ranks) == spec.num_heads
        assert sum(rank.intermediate_size for rank in ranks) == spec.intermediate_size
        assert all(len(gang.ranks[rank].layers) == len(gang.ranks[rank].own.layers) for rank in stage)
    with pytest.raises(ValueError, match="last stage"):
        gang.ranks[0].logits(torch.zeros(1, spec.hidden_size))


SMOLLM2_PROMPTS = [list(range(1000, 1040)), [504, 3575, 282, 4649, 314], list(range(40, 45))]


@pytest.mark.model
@pytest.mark.parametrize("topology", [TP2, Topology(tp=3), PP2], ids=["tp2", "tp3", "pp2"])
def test_greedy_tokens_of_smollm2(smollm2_path, topology):
    whole = load_model(smollm2_path, dtype="float32", device=CPU)
    expected = GreedyEngine(whole, num_blocks=80).generate(SMOLLM2_PROMPTS, 24)
    assert (
        greedy_engine(ThreadedGang(smollm2_path, topology, dtype="float32"), 80).generate(SMOLLM2_PROMPTS, 24)
        == expected
    )


@pytest.mark.model
@pytest.mark.skipif(native() is None, reason="no native kernels here")
@pytest.mark.parametrize("quantization", ["auto", "int8"])
def test_quantised_weights_are_cut_between_their_groups(smollm2_path, quantization):
    """The same codes and scales, also of what a rank multiplies: only the order of sums differs."""
    options = {"dtype": "auto", "quantization": quantization}
    whole = load_model(smollm2_path, device=CPU, **options)
    gang = ThreadedGang(smollm2_path, TP2, **options)
    assert [decoder.weights_format for decoder in gang.ranks] == [whole.weights_format] * 2
    hidden = torch.randn(3, 576, generator=torch.Generator().manual_seed(0))
    for index, layer in enumerate(whole.layers[:3]):
        first, second = (decoder.layers[index].mlp(hidden) for decoder in gang.ranks)
        torch.testing.assert_close(first + second, layer.mlp(hidden), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(gang.logits(hidden), whole.logits(hidden), atol=1e-4, rtol=1e-4)
