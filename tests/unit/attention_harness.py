"""Batches over shuffled pages, and attention as the contract's words say."""

from dataclasses import dataclass

import torch

from warmroot.actors.attention.interface import AttentionMetadata


@dataclass(frozen=True)
class Case:
    queries: tuple[int, ...]
    keys: tuple[int, ...]
    heads: tuple[int, int] = (4, 2)
    head_dim: int = 32
    window: int | None = None
    softcap: float | None = None
    block_size: int = 16


CASES = {
    "one decode": Case((1,), (1,)),
    "decode at a block's end": Case((1,), (32,)),
    "decodes of odd lengths": Case((1, 1, 1), (3, 47, 130)),
    "decodes of one length": Case((1, 1), (37, 37)),
    "decodes far apart": Case((1, 1, 1), (5, 700, 260)),
    "decodes, one KV head each": Case((1, 1), (17, 40), heads=(3, 3)),
    "decodes, nine heads over three": Case((1, 1), (17, 40), heads=(9, 3), head_dim=64),
    "decodes, all heads on one": Case((1, 1), (17, 40), heads=(8, 1)),
    "prompt": Case((33,), (33,)),
    "prompts of one length": Case((20, 20), (20, 20)),
    "prompts of odd lengths": Case((5, 33, 16), (5, 33, 16)),
    "chunk after a prefix": Case((13,), (50,)),
    "mixed": Case((1, 13, 1, 40), (90, 50, 2, 40)),
    "equally long chunks (speculation)": Case((4, 4, 4), (9, 60, 4)),
    "window shorter than a block": Case((1, 1), (3, 60), window=5),
    "window over blocks": Case((1, 1, 1), (20, 61, 300), window=33),
    "window of one": Case((1, 9), (20, 9), window=1),
    "window longer than all": Case((1, 13), (40, 50), window=500),
    "window, prompt": Case((70,), (70,), window=20),
    "window, chunk": Case((25, 1), (99, 60), window=20),
    "window edge on a block's edge": Case((1, 1), (48, 49), window=17),
    "softcap, decode": Case((1, 1), (20, 61), softcap=2.0),
    "softcap, prompt": Case((30,), (30,), softcap=2.0),
    "softcap, window, mixed": Case((1, 25, 30), (60, 99, 30), heads=(6, 2), window=20, softcap=3.0),
}


@dataclass
class Batch:
    query: torch.Tensor
    keys: list[torch.Tensor]
    values: list[torch.Tensor]
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    metadata: AttentionMetadata


def make_batch(case, device="cpu", dtype=torch.float32, garbage=99.0):
    """Sequences in shuffled pages. Pages that nobody sees hold large garbage; the null page is zero."""
    torch.manual_seed(0)
    num_heads, num_kv_heads = case.heads
    size = case.block_size
    widths = [-(-k // size) for k in case.keys]
    free = (1 + torch.randperm(sum(widths) + 3)).tolist()
    shape = (len(free) + 1, size, num_kv_heads, case.head_dim)
    k_cache, v_cache = torch.full(shape, garbage), torch.full(shape, garbage)
    k_cache[0] = v_cache[0] = 0.0
    tables, slots, keys, values = [], [], [], []
    for queries, length, width in zip(case.queries, case.keys, widths, strict=True):
        table = [free.pop() for _ in range(width)]
        k, v = torch.randn(2, length, num_kv_heads, case.head_dim).to(dtype).float()
        where = [table[p // size] * size + p % size for p in range(length)]
        k_cache.view(-1, *shape[2:])[where], v_cache.view(-1, *shape[2:])[where] = k, v
        for block in range(max(0, length - queries - case.window + 1) // size if case.window else 0):
            table[block] = 0
        slots += where[length - queries :]
        tables.append(table + [0] * (max(widths) - width))
        keys.append(k)
        values.append(v)
    starts = torch.tensor([0, *case.queries]).cumsum(0).int()
    metadata = AttentionMetadata(
        cu_seqlens_q=starts.to(device),
        seqused_k=torch.tensor(case.keys, dtype=torch.int32, device=device),
        block_table=torch.tensor(tables, dtype=torch.int32, device=device),
        slot_mapping=torch.tensor(slots, device=device),
        max_seqlen_q=max(case.queries),
        max_seqlen_k=max(case.keys),
    )
    query = torch.randn(sum(case.queries), num_heads, case.head_dim).to(device, dtype)
    return Batch(query, keys, values, k_cache.to(device, dtype), v_cache.to(device, dtype), metadata)


def naive(case, batch, scale):
    """One query and one head at a time, as the contract's words say."""
    group = case.heads[0] // case.heads[1]
    rows = []
    for index, (queries, length) in enumerate(zip(case.queries, case.keys, strict=True)):
        for position in range(length - queries, length):
            first = 0 if case.window is None else max(0, position - case.window + 1)
            for head in range(case.heads[0]):
                k = batch.keys[index][first : position + 1, head // group]
                v = batch.values[index][first : position + 1, head // group]
                scores = k @ batch.query[len(rows) // case.heads[0], head].float().cpu() * scale
                if case.softcap is not None:
                    scores = case.softcap * torch.tanh(scores / case.softcap)
                rows.append(torch.softmax(scores, 0) @ v)
    return torch.stack(rows).view(batch.query.shape)
