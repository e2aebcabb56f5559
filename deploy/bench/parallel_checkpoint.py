"""A small mixture of experts with random weights: routing is even, and the experts are most of a step's work."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from ...actors.models.spec import read_spec
from ...actors.models.tensors import wanted_tensors

_SCALE = 0.05


def write_sparse_model(folder: Path, seed: int, *, num_experts: int = 16, hidden: int = 512) -> Path:
    """A Mixtral of six layers in ``folder``, 230 MB by default, with two experts a token."""
    config = {
        "architectures": ["MixtralForCausalLM"],
        "vocab_size": 4096,
        "hidden_size": hidden,
        "intermediate_size": hidden,
        "num_hidden_layers": 6,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "num_local_experts": num_experts,
        "num_experts_per_tok": 2,
        "max_position_embeddings": 4096,
        "sliding_window": None,
        "eos_token_id": 2,
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        name: _SCALE * torch.randn(shape, generator=generator)
        for name, shape in wanted_tensors(read_spec(folder)).items()
    }
    save_file(tensors, folder / "model.safetensors")
    return folder
