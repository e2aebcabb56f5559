"""What an engine with drafts samples, against transformers' probabilities: chi-square over 21,000 draws each.

Three tokens follow a prompt. The first is sampled without a draft, the others where drafts are tested; all runs of
three are counted. Penalties, bias and filters are applied to transformers' logits one number at a time.
"""

import time
from collections import Counter
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from medusa_harness import fitted_outputs, save_heads

from warmroot.actors.engine.config import EngineConfig
from warmroot.actors.engine.engine import Engine
from warmroot.actors.runner.load import KvMemoryConfig, load_runner
from warmroot.cluster.ids import RequestId
from warmroot.cluster.messages import GenerateRequest
from warmroot.cluster.sampling_params import SamplingParams
from warmroot.cluster.speculative_config import SpeculativeConfig
from warmroot.kv_store.hashing import namespace_root

VOCAB = 10
PROMPT = [4, 7, 5, 4, 7, 6, 4, 7]
LENGTH = 3
NUM_REQUESTS = 7000
BATCH = 250
PARAMS = {
    "temperature 1": SamplingParams(presence_penalty=0.4, frequency_penalty=0.3, logit_bias={3: 1.0, 8: -0.5}),
    "temperature 0.7, top-p": SamplingParams(
        temperature=0.7, top_p=0.85, repetition_penalty=1.3, logit_bias={3: 0.7, 9: 0.4}
    ),
}
METHODS = {
    "ngram": {"method": "ngram", "prompt_lookup_min": 1},
    "draft_model": {"method": "draft_model", "model": "small"},
    "draft_model, coupled": {"method": "draft_model", "model": "small", "verification": "coupled"},
    "layer_skip": {"method": "layer_skip", "num_layers": 1},
    "medusa": {"method": "medusa", "model": "heads", "num_speculative_tokens": 5},
}
QUICK = {("draft_model", "temperature 0.7, top-p"), ("layer_skip", "temperature 1")}
"""What runs every time; the rest is slow only by its number."""


def build(num_layers: int) -> transformers.PreTrainedModel:
    torch.manual_seed(1)
    config = transformers.LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
        eos_token_id=2,
    )
    model = transformers.LlamaForCausalLM(config).eval()
    for parameter in model.parameters():
        parameter.data.normal_(0.0, 0.3)
    model.model.layers = model.model.layers[:num_layers]
    model.config.num_hidden_layers = num_layers
    return model


@pytest.fixture(scope="module")
def model() -> transformers.PreTrainedModel:
    return build(2)


@pytest.fixture(scope="module")
def folders(model, tmp_path_factory) -> dict[str, Path]:
    """Of the model, and by method of what drafts: a smaller one, or heads."""
    paths = {name: tmp_path_factory.mktemp(name) for name in ("model", "draft_model", "medusa")}
    model.save_pretrained(paths["model"])
    build(1).save_pretrained(paths["draft_model"])
    with torch.no_grad():
        starts = torch.randint(3, VOCAB, (24, 4), generator=torch.Generator().manual_seed(0))
        texts = model.generate(starts, max_new_tokens=40, do_sample=True, eos_token_id=None, pad_token_id=0)
    save_heads(paths["medusa"], fitted_outputs(model, texts.tolist(), 2))
    return paths


def sampled(folders: dict[str, Path], speculation: SpeculativeConfig, params: SamplingParams) -> Counter:
    """How often each run of tokens came. Drafts are accepted and rejected meanwhile."""
    runner = load_runner(
        folders["model"],
        dtype="float32",
        kv=KvMemoryConfig(block_size=4, num_kv_blocks=1300),
        speculation=speculation,
        draft_path=folders.get(speculation.method),
    )
    config = EngineConfig(max_model_len=32, max_num_batched_tokens=4096, speculation=speculation)
    engine = Engine(runner, config, time.monotonic, namespace_root("test"))
    tokens: dict[str, list[int]] = {}
    for first in range(0, NUM_REQUESTS, BATCH):
        for seed in range(first, first + BATCH):
            asked = replace(params, seed=seed, max_tokens=LENGTH + 1, ignore_eos=True)
            engine.add(GenerateRequest(request_id=RequestId(f"r{seed}"), prompt_token_ids=PROMPT, params=asked))
        while engine.has_work:
            for delta in engine.step():
                tokens.setdefault(delta.request_id, []).extend(delta.token_ids)
    counts = engine.speculator.counts
    assert 0.03 < counts.accepted_tokens / counts.draft_tokens < 0.99
    assert counts.draft_tokens > 0.6 * NUM_REQUESTS
    return Counter(tuple(run[:LENGTH]) for run in tokens.values())


def expected(model: transformers.PreTrainedModel, params: SamplingParams) -> dict[tuple[int, ...], float]:
    """Probability of every run."""
    found = {(): 1.0}
    for length in range(LENGTH):
        runs = list(product(range(VOCAB), repeat=length))
        with torch.no_grad():
            logits = model(torch.tensor([[*PROMPT, *run] for run in runs])).logits[:, -1].double().numpy()
        found = {
            (*run, token): found[run] * p
            for run, row in zip(runs, logits, strict=True)
            if run in found
            for token, p in enumerate(probabilities(row, run, params))
            if p > 0
        }
    return found


def probabilities(logits: np.ndarray, output: tuple[int, ...], params: SamplingParams) -> list[float]:
    """As the parameters are defined: repetition over prompt and output, the other penalties over the output."""
    values = [value + params.logit_bias.get(token, 0.0) for token, value in enumerate(logits.tolist())]
    for token in {*PROMPT, *output}:
        values[token] *= params.repetition_penalty if values[token] < 0 else 1 / params.repetition_penalty
    for token in range(VOCAB):
        count = output.count(token)
        values[token] -= params.frequency_penalty * count + params.presence_penalty * (count > 0)
    weights = np.exp((np.array(values) - max(values)) / params.temperature)
    weights /= weights.sum()
    kept, total = set(), 0.0
    for token in np.argsort(-weights):
        if total < params.top_p:
            kept.add(int(token))
            total += weights[token]
    return [float(weights[token] / total) if token in kept else 0.0 for token in range(VOCAB)]


def cells() -> list:
    return [
        pytest.param(*cell, id="-".join(cell), marks=() if cell in QUICK else pytest.mark.slow)
        for cell in product(METHODS, PARAMS)
    ]


@pytest.mark.parametrize(("method", "asked"), cells())
def test_samples_are_distributed_as_the_model_says(model, folders, method, asked):
    speculation = SpeculativeConfig(**{"num_speculative_tokens": 2, "adaptive": False} | METHODS[method])
    params = PARAMS[asked]
    found, wanted = sampled(folders, speculation, params), expected(model, params)
    assert set(found) <= set(wanted), "a token that a filter leaves out"
    # Cells that are expected less than five times are one.
    likely = {run: p * NUM_REQUESTS for run, p in wanted.items() if p * NUM_REQUESTS >= 5}
    rest = NUM_REQUESTS - sum(likely.values())
    pairs = [(found[run], count) for run, count in likely.items()]
    if rest >= 5:
        pairs.append((NUM_REQUESTS - sum(found[run] for run in likely), rest))
    statistic, freedom = sum((seen - count) ** 2 / count for seen, count in pairs), len(pairs) - 1
    assert freedom > 40
    assert deviation(statistic, freedom) < 3.1, "one in a thousand"


def deviation(statistic: float, freedom: int) -> float:
    """Of a chi-square statistic, in standard deviations (Wilson and Hilferty)."""
    spread = 2 / (9 * freedom)
    return ((statistic / freedom) ** (1 / 3) - (1 - spread)) / spread**0.5
