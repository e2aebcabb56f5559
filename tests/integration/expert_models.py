"""Small mixtures of experts, and what serves them."""

import time
from collections.abc import Sequence
from pathlib import Path

import torch
import transformers

from warmroot.actors.engine.config import EngineConfig
from warmroot.actors.engine.executor import Executor
from warmroot.actors.engine.joint import start_engines
from warmroot.actors.parallel.gang_config import GangConfig
from warmroot.actors.runner.load import KvMemoryConfig
from warmroot.cluster.ids import RequestId
from warmroot.cluster.messages import FinishReason, GenerateRequest
from warmroot.cluster.sampling_params import SamplingParams
from warmroot.cluster.topology import Topology
from warmroot.kv_store.hashing import namespace_root

VOCAB = 128
KV = KvMemoryConfig(block_size=4, num_kv_blocks=40)
PROMPT = torch.randint(4, VOCAB, (60,), generator=torch.Generator().manual_seed(0)).tolist()


def save_model(path: Path, skew: float = 0.0) -> Path:
    """Eight experts, of which two get a token. With ``skew`` most tokens want the first ones."""
    torch.manual_seed(3)
    config = transformers.MixtralConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=8,
        num_experts_per_tok=2,
        max_position_embeddings=256,
        sliding_window=None,
        eos_token_id=2,
    )
    model = transformers.MixtralForCausalLM(config).eval()
    for parameter in model.parameters():
        parameter.data.normal_(0.0, 0.2)
    if skew:
        _skew(model, skew)
    model.save_pretrained(path)
    return path


def _skew(model: transformers.MixtralForCausalLM, skew: float) -> None:
    """All hidden states have a first column that says the same, and the gates listen to it."""
    model.model.embed_tokens.weight.data[:, 0] = 1.0
    for name, parameter in model.named_parameters():
        if name.endswith(".gate.weight"):
            parameter.data[:, 0] = skew * torch.arange(len(parameter), 0, -1)
        if "layernorm" in name:
            parameter.data.fill_(1.0)


def gang_config(path: Path, topology: Topology, **options) -> GangConfig:
    return GangConfig(
        path=path, topology=topology, threads_per_rank=1, dtype="float32", step_s=200.0, **{"kv": KV} | options
    )


def requests(count: int = 12, name: str = "r") -> list[GenerateRequest]:
    """On pages that are too few: shared prefixes, chunks, preemption, draws, penalties, ends that nobody foresees."""
    variants = [
        {"temperature": 0.0},
        {"temperature": 0.0, "logprobs": 2, "prompt_logprobs": 1},
        {},
        {"frequency_penalty": 1.0},
        {"stop_token_ids": (7, 9, 70)},
    ]
    return [
        GenerateRequest(
            request_id=RequestId(f"{name}{n}"),
            prompt_token_ids=PROMPT[: 9 + 3 * (n % 12)] if n % 2 else PROMPT[n % 12 : 12 + 2 * (n % 12)],
            params=SamplingParams(**{"max_tokens": 24, "ignore_eos": True, "seed": n} | variants[n % 5]),
        )
        for n in range(count)
    ]


Output = dict[str, tuple[list[int], FinishReason]]


def serve(executor: Executor, wanted: Sequence[GenerateRequest], **limits) -> tuple[Output, list[str]]:
    """Tokens and ends by request, and what the engines have to say against it."""
    limits = {"max_model_len": 100, "max_num_seqs": 8, "max_num_batched_tokens": 16} | limits
    engine = start_engines(executor, EngineConfig(**limits), time.monotonic, namespace_root("test"))
    tokens: dict[str, list[int]] = {}
    reasons: dict[str, FinishReason] = {}
    errors: list[str] = []
    for request in wanted:
        engine.add(request)
    while engine.has_work:
        for delta in engine.step():
            tokens.setdefault(delta.request_id, []).extend(delta.token_ids)
            if delta.error is not None:
                errors.append(delta.error)
            if delta.finish_reason is not None:
                reasons[delta.request_id] = delta.finish_reason
    return {name: (tokens[name], reasons[name]) for name in tokens}, errors
