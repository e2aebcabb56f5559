"""Recorded steps of decodes. On a CPU a recording computes again, into the same tensor as a GPU's does."""

import time

import pytest
import torch
import transformers
from decode_harness import BLOCK_SIZE, Sequences

from warmroot.actors.engine.config import EngineConfig
from warmroot.actors.engine.engine import Engine
from warmroot.actors.models.loader import load_model
from warmroot.actors.runner.batch import apply_diff, pack
from warmroot.actors.runner.cuda_graphs import DecodeGraphs, graph_sizes
from warmroot.actors.runner.decode import DecodeBatch, EagerDecodes
from warmroot.actors.runner.runner import ModelRunner
from warmroot.cluster.ids import RequestId
from warmroot.cluster.kv_layout import KvLayout
from warmroot.cluster.messages import GenerateRequest
from warmroot.cluster.sampling_params import SamplingParams
from warmroot.kv_store.hashing import namespace_root

CPU = torch.device("cpu")


def record(compute):
    result = compute().clone()
    return lambda: result.copy_(compute())


def make_batch(size: int) -> DecodeBatch:
    return DecodeBatch(size, 2, BLOCK_SIZE, CPU, num_blocks=40)


class Graphs:
    """Recordings whose logits are what the batch holds."""

    def __init__(self, *sizes: int) -> None:
        self.computed: list[tuple[int, int]] = []
        eager = EagerDecodes(self.compute, make_batch)
        self.graphs = DecodeGraphs(self.compute, make_batch, sizes, record, eager)

    def compute(self, batch: DecodeBatch, max_seqlen_k: int) -> torch.Tensor:
        self.computed.append((batch.size, max_seqlen_k))
        rows = [batch.token_ids, batch.positions]
        for group in batch.metadata(max_seqlen_k):
            rows += [group.seqused_k, group.slot_mapping, group.block_table.sum(1)]
        return torch.stack(rows, 1).float()

    def step(self, sequences: Sequences, *plan) -> None:
        plan = sequences.plan(*plan)
        apply_diff(sequences.table, plan)
        states = [sequences.table[step.request_id] for step in plan.sequences]
        found = self.graphs.logits(sequences.table, states, [step.num_computed for step in plan.sequences])
        batch = pack(sequences.table, plan, BLOCK_SIZE)
        rows = [batch.token_ids, batch.positions]
        for group in batch.groups:
            rows += [batch.seqused_k, group.slot_mapping, group.block_table.sum(1)]
        assert found.tolist() == [list(map(float, row)) for row in zip(*rows, strict=True)]
        sequences.sampled(plan)


@pytest.mark.parametrize(
    ("most", "sizes"),
    [(1, (1,)), (4, (1, 2, 4)), (20, (1, 2, 4, 8, 16, 20)), (64, (1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64))],
)
def test_sizes(most, sizes):
    assert graph_sizes(most) == sizes


def test_sizes_of_many():
    sizes = graph_sizes(256)
    assert sizes[-6:] == (96, 128, 160, 192, 224, 256) and list(sizes) == sorted(set(sizes))


def test_the_next_larger_size_is_filled_and_replayed():
    sequences, graphs = Sequences(1), Graphs(1, 2, 4)
    for added, size in ((1, 1), (1, 2), (1, 4), (1, 4)):
        graphs.computed.clear()
        graphs.step(sequences, [], added)
        # Recorded with room for the longest.
        assert set(graphs.computed) == {(size, 40 * BLOCK_SIZE)}
    assert len(graphs.computed) == 1, "this size was recorded before"
    for dropped in (["s0"], ["s2"], ["s1"]):
        graphs.computed.clear()
        graphs.step(sequences, dropped, 0)
        assert len(graphs.computed) == 1


def test_more_than_the_largest_size_run_one_by_one():
    sequences, graphs = Sequences(2), Graphs(1, 2)
    graphs.step(sequences, [], 3)
    longest = max(sequences.lengths.values()) - 1
    assert graphs.computed == [(3, longest)]
    graphs.step(sequences, ["s0"], 0)
    assert graphs.computed[1:] == [(2, 40 * BLOCK_SIZE)] * 2


def test_batches_that_change_all_the_time():
    for seed in range(10):
        sequences, graphs = Sequences(seed), Graphs(2, 4, 8)
        for _ in range(40):
            names = list(sequences.lengths)
            dropped = sequences.random.sample(names, sequences.random.choice([0, 0, len(names) // 2]))
            left = len(names) - len(dropped)
            added = sequences.random.choice([0, 0, sequences.random.randrange(10 - left)]) or int(left == 0)
            graphs.step(sequences, dropped, added)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    torch.manual_seed(3)
    config = transformers.MistralConfig(
        vocab_size=128,
        hidden_size=128,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        sliding_window=None,
    )
    model = transformers.MistralForCausalLM(config)
    for parameter in model.parameters():
        parameter.data.normal_(0.0, 0.1)
    folder = tmp_path_factory.mktemp("model")
    model.save_pretrained(folder)
    return folder


def outputs(runner: ModelRunner) -> dict[str, list[int]]:
    config = EngineConfig(max_model_len=128, max_num_seqs=8)
    engine = Engine(runner, config, time.monotonic, namespace_root("test"))
    found: dict[str, list[int]] = {}
    for n in range(7):
        engine.add(
            GenerateRequest(
                request_id=RequestId(f"r{n}"),
                prompt_token_ids=[5 + n, *range(10, 20 + 3 * n)],
                params=SamplingParams(temperature=float(n % 2), seed=n, max_tokens=5 + 6 * n, ignore_eos=True),
            )
        )
    while engine.has_work:
        for delta in engine.step():
            found.setdefault(delta.request_id, []).extend(delta.token_ids)
    return found


def test_a_model_says_the_same(folder):
    decoder = load_model(folder, dtype="float32", device=CPU)
    layout = KvLayout.of(decoder.spec.layer_windows, 16)
    expected = outputs(ModelRunner(decoder, layout, 100))
    runner = ModelRunner(decoder, layout, 100)
    batches = []

    def fixed_batch(size: int) -> DecodeBatch:
        batches.append(size)
        return runner._graph_batch(size)

    runner._decodes = DecodeGraphs(runner._logits, fixed_batch, (2, 4), record, runner._decodes)
    assert outputs(runner) == expected
    assert sorted(batches) == [2, 4]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_recorded_on_a_gpu(folder):
    pytest.importorskip("vllm_flash_attn")
    decoder = load_model(folder, dtype="float16", device=torch.device("cuda"))
    layout = KvLayout.of(decoder.spec.layer_windows, 16)
    runner = ModelRunner(decoder, layout, 100)
    assert isinstance(runner._decodes, DecodeGraphs)
    recorded = outputs(runner)
    eager = ModelRunner(decoder, layout, 100)
    eager._decodes = EagerDecodes(eager._logits, eager._decode_batch)
    assert outputs(eager) == recorded
