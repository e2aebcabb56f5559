"""Small checkpoints in the layouts of GPTQ and AWQ tools, and their values as those layouts define them, bit by bit."""

import json
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

from warmroot.actors.models.tensors import wanted_tensors, whole_model
from warmroot.cluster.model_config import spec_from_hf

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 256,
    "intermediate_size": 384,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 80,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "eos_token_id": 2,
}
AWQ_NIBBLES = (0, 2, 4, 6, 1, 3, 5, 7)
"""Outputs of the nibbles of an int32, the lowest first."""


def gptq(**settings) -> dict:
    return {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": False, **settings}


def awq(**settings) -> dict:
    return {"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": True, "version": "gemm", **settings}


def words(generator: torch.Generator, *shape: int) -> torch.Tensor:
    """Every bit at random."""
    return torch.randint(-(2**31), 2**31, shape, generator=generator).to(torch.int32)


def bits_of(word: int, first: int, count: int) -> int:
    return (int(word) & 0xFFFFFFFF) >> first & (1 << count) - 1


def quantised_linear(settings: dict, rows: int, columns: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
    bits, size = settings["bits"], settings["group_size"]
    size, pack = (columns if size < 0 else size), 32 // bits
    groups = -(-columns // size)
    scales = ((torch.rand(groups, rows, generator=generator) + 0.5) * 0.1 / (1 << bits - 1)).half()
    if settings["quant_method"] == "awq":
        return {
            "qweight": words(generator, columns, rows // pack),
            "qzeros": words(generator, groups, rows // pack),
            "scales": scales,
        }
    zeros = words(generator, groups, rows // pack)
    if settings["sym"]:
        middle = (1 << bits - 1) - (settings.get("checkpoint_format", "gptq") == "gptq")
        zeros.fill_(int(np.uint32(sum(middle << bits * i for i in range(pack))).astype(np.int32)))
    group_of = torch.arange(columns) // size
    if settings["desc_act"]:
        group_of = group_of[torch.randperm(columns, generator=generator)]
    return {
        "qweight": words(generator, columns // pack, rows),
        "qzeros": zeros,
        "scales": scales,
        "g_idx": group_of.to(torch.int32),
    }


def reference(settings: dict, stored: dict[str, torch.Tensor]) -> torch.Tensor:
    """float32 [out, in]: each value out of its own bits."""
    qweight, qzeros = stored["qweight"].numpy(), stored["qzeros"].numpy()
    scales = stored["scales"].float().numpy()
    bits = settings["bits"]
    pack = 32 // bits
    if settings["quant_method"] == "awq":
        columns, rows = qweight.shape[0], qweight.shape[1] * pack
        size = columns if settings["group_size"] < 0 else settings["group_size"]
        group_of = np.arange(columns) // size

        def code(n: int, k: int) -> int:
            return bits_of(qweight[k, n // pack], 4 * AWQ_NIBBLES.index(n % pack), 4)

        def zero(n: int, g: int) -> int:
            return bits_of(qzeros[g, n // pack], 4 * AWQ_NIBBLES.index(n % pack), 4)
    else:
        columns, rows = qweight.shape[0] * pack, qweight.shape[1]
        group_of = stored["g_idx"].numpy()
        less = settings.get("checkpoint_format", "gptq") == "gptq"

        def code(n: int, k: int) -> int:
            return bits_of(qweight[k // pack, n], bits * (k % pack), bits)

        def zero(n: int, g: int) -> int:
            return (bits_of(qzeros[g, n // pack], bits * (n % pack), bits) + less) % (1 << bits)

    codes = np.array([[code(n, k) for k in range(columns)] for n in range(rows)])
    zeros = np.array([[zero(n, g) for g in range(len(scales))] for n in range(rows)])
    return torch.from_numpy(scales.T[:, group_of] * (codes - zeros[:, group_of]).astype(np.float32))


def write_folder(folder: Path, settings: dict, config: dict = LLAMA, *, seed: int = 0) -> dict[str, torch.Tensor]:
    """A quantised checkpoint in ``folder`` and its values as floats in ``folder``-plain; returns those by name."""
    spec, generator = spec_from_hf(config), torch.Generator().manual_seed(seed)
    heads = ("lm_head",) if settings.get("lm_head") else ()
    linears = {name for name in whole_model(spec).linears() if ".layers." in name or name.startswith(heads)}
    linears |= {name for name in wanted_tensors(spec) if name.endswith("kv_b_proj.weight")}
    stored, values = {}, {}
    for name, shape in wanted_tensors(spec).items():
        if name not in linears or shape[0] % 8:  # eight outputs are a word
            spread = 0.1 * torch.randn(shape, generator=generator)
            stored[name] = values[name] = 1 + spread if "norm" in name else spread.half().float()
            continue
        tensors = quantised_linear(settings, *shape, generator)
        stored |= {f"{name.removesuffix('.weight')}.{part}": tensor for part, tensor in tensors.items()}
        values[name] = reference(settings, tensors)
    plain = folder.with_name(folder.name + "-plain")
    for path, tensors, extra in ((folder, stored, {"quantization_config": settings}), (plain, values, {})):
        path.mkdir()
        (path / "config.json").write_text(json.dumps(config | extra))
        save_file(tensors, path / "model.safetensors")
    return values
