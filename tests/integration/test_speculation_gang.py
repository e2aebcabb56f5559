"""Drafts that are verified by a gang: the same tokens as one process gives without them."""

import time
from pathlib import Path

import pytest
import torch
import transformers

from warmroot.actors.engine.config import EngineConfig
from warmroot.actors.engine.engine import Engine
from warmroot.actors.engine.executor import Executor
from warmroot.actors.parallel.gang import start_gang
from warmroot.actors.parallel.gang_config import GangConfig
from warmroot.actors.parallel.spawn import RankProcesses
from warmroot.actors.runner.load import KvMemoryConfig, load_runner
from warmroot.cluster.ids import RequestId
from warmroot.cluster.messages import GenerateRequest
from warmroot.cluster.sampling_params import SamplingParams
from warmroot.cluster.speculative_config import SpeculativeConfig
from warmroot.cluster.topology import Topology
from warmroot.kv_store.hashing import namespace_root

KV = KvMemoryConfig(block_size=4, num_kv_blocks=60)
NGRAM = SpeculativeConfig(method="ngram", prompt_lookup_min=1, num_speculative_tokens=4, adaptive=False)
VARIANTS = [{"temperature": 0.0}, {"temperature": 0.0, "logprobs": 2}, {"temperature": 0.5}, {"frequency_penalty": 0.3}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    torch.manual_seed(3)
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        eos_token_id=2,
    )
    model = transformers.LlamaForCausalLM(config).eval()
    for parameter in model.parameters():
        parameter.data.normal_(0.0, 0.2)
    path = tmp_path_factory.mktemp("model")
    model.save_pretrained(path)
    return path


def outputs(executor: Executor, speculation: SpeculativeConfig | None) -> tuple[dict[str, list[int]], int]:
    """Tokens by request, and how many drafted ones were accepted."""
    config = EngineConfig(max_model_len=100, max_num_seqs=6, max_num_batched_tokens=24, speculation=speculation)
    engine = Engine(executor, config, time.monotonic, namespace_root("test"))
    prompt = torch.randint(4, 64, (30,), generator=torch.Generator().manual_seed(0)).tolist()
    for index in range(10):
        params = {"max_tokens": 24, "ignore_eos": True, "seed": index} | VARIANTS[index % 4]
        request_id = RequestId(f"r{index}")
        engine.add(
            GenerateRequest(
                request_id=request_id, prompt_token_ids=prompt[: 8 + 2 * index], params=SamplingParams(**params)
            )
        )
    tokens: dict[str, list[int]] = {}
    while engine.has_work:
        for delta in engine.step():
            assert delta.error is None
            tokens.setdefault(delta.request_id, []).extend(delta.token_ids)
    return tokens, engine.load().num_draft_tokens and sum(engine.load().accepted_by_place)


@pytest.mark.parametrize("topology", [Topology(tp=2), Topology(pp=2)], ids=["tp 2", "pp 2"])
def test_a_gang_verifies_drafts(folder, topology):
    expected, _ = outputs(load_runner(folder, dtype="float32", kv=KV), None)
    config = GangConfig(path=folder, topology=topology, kv=KV, threads_per_rank=1, dtype="float32", step_s=200.0)
    gang = start_gang(RankProcesses(config))
    try:
        found, num_accepted = outputs(gang, NGRAM)
    finally:
        gang.shutdown()
    assert found == expected
    assert num_accepted > 20
