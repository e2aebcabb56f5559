"""One rank of a sharded model as a process, run by the tests: ``sharded_rank.py MODEL TP RANK STORE_PORT DTYPE``.

Prints a line of JSON: logits after a prompt and a decode, the sums, and by how much loading raised the peak of memory.
"""

import json
import os
import resource
import sys
from pathlib import Path

import torch

from warmroot.actors.attention.interface import AttentionMetadata
from warmroot.actors.attention.kv_memory import KvMemory
from warmroot.actors.kernels.library import native
from warmroot.actors.models.decoder import Decoder
from warmroot.actors.models.loader import load_model
from warmroot.actors.models.spec import read_spec
from warmroot.actors.parallel.groups import RankLists, make_groups
from warmroot.actors.parallel.rendezvous import join_store
from warmroot.actors.parallel.shard import Shard
from warmroot.actors.parallel.traffic import Traffic
from warmroot.actors.runner.threads import use_threads
from warmroot.cluster.kv_layout import KvLayout
from warmroot.cluster.parallel_layout import ParallelLayout
from warmroot.cluster.topology import Topology

CPU = torch.device("cpu")
BLOCK = 16
LIMIT_S = 60.0
PROMPT = 300
"""Tokens: more than go through an MLP together."""


def metadata(layout: KvLayout, num_tokens: int, length: int) -> tuple[AttentionMetadata, ...]:
    """One sequence; the groups' blocks lie side by side."""
    width = -(-512 // BLOCK)
    entries = []
    for group in range(len(layout.groups)):
        first = 1 + group * width
        positions = torch.arange(length - num_tokens, length)
        entries.append(
            AttentionMetadata(
                torch.tensor([0, num_tokens], dtype=torch.int32),
                torch.tensor([length], dtype=torch.int32),
                torch.arange(first, first + width, dtype=torch.int32).unsqueeze(0),
                first * BLOCK + positions,
                num_tokens,
                length,
            )
        )
    return tuple(entries)


def compute(decoder: Decoder) -> list[float] | None:
    """Logits after a prompt and one more token; None on ranks that do not sample."""
    layout = KvLayout.of(decoder.spec.layer_windows, BLOCK)
    num_blocks = 1 + len(layout.groups) * 32
    kv = KvMemory.allocate(
        layout, num_blocks, decoder.kv_heads, decoder.spec.head_dim, decoder.dtype, CPU, decoder.backend
    )
    prompt = torch.randint(4, 60, (PROMPT,), generator=torch.Generator().manual_seed(0))
    decoder.forward(prompt, torch.arange(PROMPT), kv, metadata(layout, PROMPT, PROMPT))
    hidden = decoder.forward(torch.tensor([5]), torch.tensor([PROMPT]), kv, metadata(layout, 1, PROMPT + 1))
    logits = decoder.logits(hidden)
    return None if logits is None else logits[0].tolist()


def main(model: str, tp: str, rank: str, port: str, dtype: str) -> None:
    use_threads(1)
    path, topology, traffic = Path(model), Topology(tp=int(tp)), Traffic()
    groups = make_groups(
        int(rank),
        RankLists.of(topology, int(rank)),
        join_store("127.0.0.1", int(port), LIMIT_S),
        address="127.0.0.1",
        device=CPU,
        library=native(),
        deadline_s=LIMIT_S,
        traffic=traffic,
    )
    shard = Shard(ParallelLayout.of(read_spec(path), topology), int(rank), groups)
    before = _peak()
    decoder = load_model(path, dtype=dtype, device=CPU, shard=shard)
    loaded = _peak() - before
    logits = compute(decoder)
    found = {
        "logits": logits,
        "group": type(groups.tp).__name__,
        "fused": decoder._fused is not None,
        "sums": traffic.num_calls["all_reduce"],
        "sum_bytes": traffic.num_bytes["all_reduce"],
        "load_bytes": loaded,
    }
    groups.control.barrier()
    print(json.dumps(found), flush=True)
    os._exit(0)


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


if __name__ == "__main__":
    main(*sys.argv[1:])
