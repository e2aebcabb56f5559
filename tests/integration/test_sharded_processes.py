"""A model cut over processes that sum in shared memory, inside the native step."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from warmroot.actors.kernels.library import native
from warmroot.actors.models.loader import load_model
from warmroot.actors.models.source import resolve_model
from warmroot.actors.models.spec import read_spec
from warmroot.actors.models.tensors import wanted_tensors
from warmroot.actors.parallel.rendezvous import serve_store
from warmroot.actors.parallel.shared_memory import can_share_memory
from warmroot.cluster.errors import ModelLoadError
from warmroot.cluster.parallel_layout import ParallelLayout
from warmroot.cluster.step_traffic import step_traffic
from warmroot.cluster.topology import Topology

from .sharded_rank import PROMPT, compute

SCRIPT = Path(__file__).with_name("sharded_rank.py")
LIMIT_S = 60.0
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 32,
    "vocab_size": 71,
    "max_position_embeddings": 512,
    "eos_token_id": 2,
}
MODELS = {
    "llama": {"architectures": ["LlamaForCausalLM"], "mlp_bias": True, "attention_bias": True},
    # Norms of what attention and MLP give: sums come before them.
    "gemma2": {
        "architectures": ["Gemma2ForCausalLM"],
        "sliding_window": 40,
        "query_pre_attn_scalar": 24,
        "tie_word_embeddings": True,
    },
}


@pytest.fixture(params=MODELS)
def folder(request, tmp_path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps({**SIZES, **MODELS[request.param]}))
    generator = torch.Generator().manual_seed(0)
    shapes = wanted_tensors(read_spec(tmp_path))
    save_file(
        {name: 0.2 * torch.randn(shape, generator=generator) for name, shape in shapes.items()},
        tmp_path / "model.safetensors",
    )
    return tmp_path


def run_ranks(model: Path, tp: int, cache: Path) -> list[dict]:
    """What the ranks print; ``cache`` is where they keep packed weights."""
    store = serve_store("127.0.0.1", LIMIT_S)
    processes = [
        subprocess.Popen(
            [sys.executable, str(SCRIPT), str(model), str(tp), str(rank), str(store.port), "float32"],
            env={**os.environ, "OMP_NUM_THREADS": "1", "WARMROOT_CACHE_DIR": str(cache)},
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for rank in range(tp)
    ]
    try:
        outputs = [process.communicate(timeout=LIMIT_S) for process in processes]
    finally:
        for process in processes:
            process.kill()
    for process, (_, errors) in zip(processes, outputs, strict=True):
        assert process.returncode == 0, errors
    return [json.loads(output.splitlines()[-1]) for output, _ in outputs]


@pytest.mark.skipif(not can_share_memory(native()), reason="no native library with shared memory")
def test_native_sums_between_the_halves_of_a_step(folder):
    whole = compute(load_model(folder, dtype="float32", device=torch.device("cpu")))
    assert whole is not None
    first, second = run_ranks(folder, 2, folder / "cache")
    assert (first["group"], first["fused"]) == ("SharedMemoryGroup", True)
    torch.testing.assert_close(torch.tensor(first["logits"]), torch.tensor(whole), atol=1e-4, rtol=1e-5)
    assert second["logits"] is None
    layout = ParallelLayout.of(read_spec(folder), Topology(tp=2))
    steps = [step_traffic(layout, 0, tokens=tokens, sampled=1, activation_bytes=4) for tokens in (PROMPT, 1)]
    planned = [transfer for step in steps for transfer in step if transfer.operation == "all_reduce"]
    for rank in (first, second):
        assert rank["sums"] == sum(transfer.count for transfer in planned)
        assert rank["sum_bytes"] == sum(transfer.count * transfer.payload for transfer in planned)


@pytest.mark.slow  # resident memory, which depends on what else the machine does
@pytest.mark.model
@pytest.mark.skipif(not can_share_memory(native()), reason="no native library with shared memory")
def test_no_rank_reads_the_whole_model(tmp_path):
    """Loading for the first time, which packs the weights, takes little more than half of the memory."""
    try:
        smollm2 = resolve_model("smollm2")
    except ModelLoadError as error:
        pytest.skip(str(error))
    (whole,) = run_ranks(smollm2, 1, tmp_path)
    assert whole["load_bytes"] > 300e6
    for rank in run_ranks(smollm2, 2, tmp_path):
        assert rank["load_bytes"] <= 0.6 * whole["load_bytes"]
