"""Whole models whose attention is data-parallel: each group has its own sequences, and tokens travel to experts."""

import threading
from dataclasses import replace
from typing import Any, cast

import pytest
import torch
from moe_harness import ThreadGroup, run_ranks

from warmroot.actors.models.decoder import Decoder
from warmroot.actors.models.loader import load_model
from warmroot.actors.models.spec import read_spec
from warmroot.actors.parallel.collectives import Collectives
from warmroot.actors.parallel.shard import Shard
from warmroot.cluster.parallel_layout import ParallelLayout
from warmroot.cluster.topology import Topology

from .conftest import Family, PagedSequences
from .sharded_harness import Meeting
from .sharded_harness import ThreadGroup as SumGroup
from .sparse_families import FAMILIES as SPARSE

CPU = torch.device("cpu")
EXPERTS = {
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 3,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
}
FAMILIES = {
    "qwen2_moe": Family(
        "Qwen2MoeForCausalLM", EXPERTS | {"shared_expert_intermediate_size": 40, "mlp_only_layers": [1]}
    ),
    "qwen3_moe": Family("Qwen3MoeForCausalLM", EXPERTS | {"norm_topk_prob": True, "head_dim": 16}),
    "deepseek_v3": SPARSE["deepseek_v3"],
}


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request, tmp_path_factory):
    path = tmp_path_factory.mktemp(request.param)
    FAMILIES[request.param].build().save_pretrained(path)
    return path


class AnyRank:
    """A rank's decoder whose logits are zeros where another rank of its tp group samples."""

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder

    def __getattr__(self, name: str) -> Any:
        return getattr(self._decoder, name)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        found = self._decoder.logits(hidden)
        return torch.zeros(len(hidden), self._decoder.spec.vocab_size) if found is None else found


def logits(decoder: Any, group: int) -> torch.Tensor:
    """Of the sequences that a dp group has: a prompt each, then a step with a second prompt, then one more token."""
    generator = torch.Generator().manual_seed(group)

    def some(length: int) -> list[int]:
        return torch.randint(4, 256, (length,), generator=generator).tolist()

    sequences = PagedSequences(decoder)
    steps = [{0: some(3 + 7 * group)}, {0: some(1), 1: some(12 - 2 * group)}, {0: some(1), 1: some(1)}]
    return torch.cat([torch.cat(list(sequences.step(step).values())) for step in steps])


@pytest.mark.parametrize(
    ("topology", "copies"),
    [(Topology(ep=2), 0), (Topology(ep=2), 4), (Topology(ep=4), 0), (Topology(ep=4), 8), (Topology(tp=2, ep=4), 4)],
    ids=["ep2", "ep2-copies", "ep4", "ep4-copies", "tp2-ep4-copies"],
)
def test_every_group_has_the_logits_of_the_whole_model(folder, topology, copies):
    spec = read_spec(folder)
    layout = ParallelLayout.of(spec, topology, num_redundant_experts=copies)
    meetings = [Meeting(topology.tp) for _ in topology.tp_groups]
    solo, loading = Shard.whole(spec).groups, threading.Lock()

    def run(rank: int, ep: ThreadGroup) -> torch.Tensor:
        place = topology.place(rank)
        tp = SumGroup(place.tp_rank, topology.tp, meetings[place.dp_rank])
        groups = replace(solo, tp=cast(Collectives, tp), ep=ep)
        with loading:
            decoder = load_model(folder, dtype="float32", device=CPU, shard=Shard(layout, rank, groups))
        found = logits(AnyRank(decoder), place.dp_rank)
        assert sum(ep.log.count(step) for step in ("start", "counts")) == 3 * 3 * sum(spec.moe.sparse_layers)
        return found

    found = run_ranks(topology.ep, run)
    whole = load_model(folder, dtype="float32", device=CPU)
    for group in range(topology.attention_dp):
        torch.testing.assert_close(found[group * topology.tp], logits(whole, group), atol=1e-4, rtol=1e-4)
