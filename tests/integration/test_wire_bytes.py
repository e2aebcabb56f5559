"""What live gangs put on the wire, in every step, equals what ``step_traffic`` and ``warmroot plan`` say."""

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from warmroot.actors.engine.plan import NewSequence, SequenceStep, StepPlan
from warmroot.actors.models.spec import read_spec
from warmroot.actors.models.tensors import wanted_tensors
from warmroot.actors.parallel.gang import GangExecutor, start_gang
from warmroot.actors.parallel.gang_config import GangConfig
from warmroot.actors.parallel.spawn import RankProcesses
from warmroot.actors.runner.load import KvMemoryConfig, load_runner
from warmroot.cluster.ids import BlockId, RequestId
from warmroot.cluster.parallel_layout import ParallelLayout
from warmroot.cluster.sampling_params import SamplingParams
from warmroot.cluster.step_traffic import exchange_bytes, step_traffic
from warmroot.cluster.topology import Topology
from warmroot.deploy.bench.peers.predicted_bytes import KINDS

KV = KvMemoryConfig(block_size=16, num_kv_blocks=20)
FLOAT_BYTES = 4
PROMPTS = (13, 5, 1)
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 71,
    "max_position_embeddings": 256,
    "eos_token_id": 2,
}
MODELS = {
    "llama": {"architectures": ["LlamaForCausalLM"]},
    "olmoe": {"architectures": ["OlmoeForCausalLM"], "num_experts": 4, "num_experts_per_tok": 2},
    "mixtral": {"architectures": ["MixtralForCausalLM"], "num_local_experts": 8, "num_experts_per_tok": 2},
}
"""OLMoE's norms over all heads are sums of their own."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    generator, found = torch.Generator().manual_seed(0), {}
    for name, config in MODELS.items():
        folder = found[name] = tmp_path_factory.mktemp(name)
        (folder / "config.json").write_text(json.dumps({**SIZES, **config}))
        shapes = wanted_tensors(read_spec(folder))
        tensors = {key: 0.2 * torch.randn(shape, generator=generator) for key, shape in shapes.items()}
        save_file(tensors, folder / "model.safetensors")
    return found


@contextmanager
def running(folder: Path, topology: Topology) -> Iterator[tuple[GangExecutor, ParallelLayout]]:
    config = GangConfig(
        path=folder, topology=topology, kv=KV, threads_per_rank=1, dtype="float32", expert_balance_steps=0
    )
    executor = start_gang(RankProcesses(config))
    try:
        yield executor, config.layout()
    finally:
        executor.shutdown()


def plans(group: int, num_groups: int) -> list[StepPlan]:
    """A group's own prompts together, a part of a long one beside decodes, its rest, decodes alone."""
    ids = [RequestId(f"r{n}") for n in range(len(PROMPTS)) if n % num_groups == group]
    lengths = [PROMPTS[n] for n in range(len(PROMPTS)) if n % num_groups == group]
    long, rest = RequestId("long"), 40
    first = StepPlan(
        step=1,
        new=tuple(new_sequence(id, n, 1 + i) for i, (id, n) in enumerate(zip(ids, lengths, strict=True))),
        sequences=tuple(advance(id, 0, n) for id, n in zip(ids, lengths, strict=True)),
    )
    decodes = [tuple(advance(id, n + step, 1) for id, n in zip(ids, lengths, strict=True)) for step in range(3)]
    if group:
        return [first, *(StepPlan(step=2 + n, sequences=steps) for n, steps in enumerate(decodes))]
    return [
        first,
        StepPlan(
            step=2,
            new=(new_sequence(long, rest, 8),),
            sequences=(*decodes[0], advance(long, 0, 30, samples=False)),
        ),
        StepPlan(step=3, sequences=(advance(long, 30, rest - 30), *decodes[1])),
        StepPlan(step=4, sequences=decodes[2]),
    ]


def new_sequence(request_id: RequestId, length: int, block: int) -> NewSequence:
    tokens = torch.randint(4, 70, (length,), generator=torch.Generator().manual_seed(length)).tolist()
    return NewSequence(
        request_id=request_id,
        token_ids=tokens,
        num_prompt_tokens=length,
        params=SamplingParams(temperature=0.0),
        seed=0,
        num_computed=0,
        block_tables=([BlockId(block + n) for n in range(3)] if length > 16 else [BlockId(block)],),
    )


def advance(request_id: RequestId, num_computed: int, num_tokens: int, *, samples: bool = True) -> SequenceStep:
    return SequenceStep(
        request_id=request_id, num_computed=num_computed, num_tokens=num_tokens, samples=samples, new_blocks=([],)
    )


def run(executor: GangExecutor, step: list[StepPlan]) -> list[tuple[dict[str, int], dict[str, int]]]:
    """By rank, the bytes and the calls of one step."""
    before = executor.times()
    executor.submit_all(step)
    assert executor.result().error is None
    return [
        (growth(old.num_bytes, new.num_bytes), growth(old.num_calls, new.num_calls))
        for old, new in zip(before, executor.times(), strict=True)
    ]


def growth(before: Mapping[str, int], after: Mapping[str, int]) -> dict[str, int]:
    return {kind: count - before.get(kind, 0) for kind, count in after.items() if count != before.get(kind, 0)}


def foreseen(layout: ParallelLayout, rank: int, plan: StepPlan) -> tuple[dict[str, float], dict[str, int]]:
    """Bytes and operations of a step without what the routing decides."""
    sampled = sum(sequence.samples for sequence in plan.sequences)
    num_bytes: Counter[str] = Counter()
    num_calls: Counter[str] = Counter()
    transfers = step_traffic(layout, rank, tokens=plan.num_tokens, sampled=sampled, activation_bytes=FLOAT_BYTES)
    for transfer in transfers:
        num_bytes[KINDS[transfer.purpose]] += transfer.count * transfer.payload
        num_calls[KINDS[transfer.purpose]] += transfer.count
    return dict(num_bytes), dict(num_calls)


@pytest.mark.parametrize(
    ("model", "sizes"),
    [
        ("llama", {"tp": 2}),
        ("llama", {"pp": 2}),
        ("llama", {"tp": 2, "pp": 2}),
        ("olmoe", {"tp": 2, "ep": 2}),
    ],
    ids=["tp 2", "pp 2", "tp 2 pp 2", "sparse tp 2 ep 2"],
)
def test_every_step_sends_what_is_foreseen(folders, model, sizes):
    """To the byte, and in as many operations: so also by layer."""
    topology = Topology(**sizes)
    with running(folders[model], topology) as (executor, layout):
        for plan in plans(0, 1):
            for rank, (num_bytes, num_calls) in enumerate(run(executor, [plan])):
                expected_bytes, expected_calls = foreseen(layout, rank, plan)
                assert num_bytes == expected_bytes
                if layout.ranks[rank].samples:  # it joins the gather, and gives nothing
                    num_calls.pop("all_gather", None)
                assert num_calls == expected_calls
                if model == "llama":
                    check_by_hand(layout, rank, plan, num_bytes, num_calls)


def check_by_hand(layout, rank: int, plan: StepPlan, num_bytes: dict[str, int], num_calls: dict[str, int]) -> None:
    """A token's hidden states are summed twice a layer and once after the embedding, and go to the next stage once."""
    own, row = layout.ranks[rank], SIZES["hidden_size"] * FLOAT_BYTES
    if layout.topology.tp > 1:
        num_sums = 2 * len(own.layers) + own.has_embedding
        assert num_bytes["all_reduce"] / num_calls["all_reduce"] == plan.num_tokens * row
        assert num_bytes["all_reduce"] / plan.num_tokens == num_sums * row
    if not own.has_head:
        assert num_bytes["hop"] == plan.num_tokens * row


class Choices:
    """A sparse layer's router, and how many tokens it has sent to each rank."""

    def __init__(self, router, experts_per_rank: int) -> None:
        self.router = router
        self.experts_per_rank = experts_per_rank
        self.rows: Counter[int] = Counter()

    def __call__(self, x):
        experts, weights = self.router(x)
        for chosen in experts.tolist():
            self.rows.update({expert // self.experts_per_rank for expert in chosen})
        return experts, weights


def routed_rows(folder: Path, steps: list[StepPlan], num_ranks: int, num_experts: int) -> list[list[list[int]]]:
    """[step][layer][rank]: tokens that have an expert there, by one process that runs the same plans."""
    runner = load_runner(folder, dtype="float32", kv=KV)
    mlps = runner.decoder.sparse_mlps.values()
    for mlp in mlps:
        mlp._router = Choices(mlp._router, num_experts // num_ranks)
    found = []
    for plan in steps:
        for mlp in mlps:
            mlp._router.rows.clear()
        runner.submit(plan)
        assert runner.result().error is None
        found.append([[mlp._router.rows[rank] for rank in range(num_ranks)] for mlp in mlps])
    return found


def test_exchanges_send_the_rows_that_were_routed(folders):
    """Attention is data-parallel over two ranks: what leaves each one in every layer, by the tokens' own choices."""
    by_group = [plans(group, 2) for group in range(2)]
    rows = [routed_rows(folders["mixtral"], steps, 2, 8) for steps in by_group]
    with running(folders["mixtral"], Topology(ep=2)) as (executor, layout):
        for step, both in enumerate(zip(*by_group, strict=True)):
            for rank, (num_bytes, num_calls) in enumerate(run(executor, list(both))):
                layers = [
                    exchange_bytes(layout, [rows[group][step][layer] for group in range(2)], rank, FLOAT_BYTES)
                    for layer in range(SIZES["num_hidden_layers"])
                ]
                assert num_bytes["counts"] == sum(layer["counts"] for layer in layers)
                assert num_bytes["all_to_all"] == sum(layer["dispatch"] + layer["combine"] for layer in layers)
                assert num_calls == {"counts": len(layers), "all_to_all": 2 * len(layers)}
