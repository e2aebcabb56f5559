"""The runner that our own contenders load, in the precision that the bench names."""

from pathlib import Path
from typing import Any

import torch

from ....actors.runner.load import KvMemoryConfig, load_runner
from ....actors.runner.runner import ModelRunner
from ....actors.runner.threads import use_threads
from ....cluster.weight_formats import ON_LOAD

_DENSE = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
"""Precisions for which weights are dequantised, with their dtype; GGUF types mean the file as packed."""


def load(settings: dict[str, Any]) -> ModelRunner:
    """Settings: ``model``, ``precision``, ``threads``, ``max_model_len``, ``max_num_seqs``, ``num_kv_blocks``."""
    use_threads(settings["threads"])
    dtype, quantization = weights_format(settings["precision"])
    return load_runner(
        Path(settings["model"]),
        dtype=dtype,
        quantization=quantization,
        kv=KvMemoryConfig(num_kv_blocks=settings["num_kv_blocks"]),
        max_model_len=settings["max_model_len"],
        max_num_seqs=settings["max_num_seqs"],
    )


def weights_format(precision: str) -> tuple[str, str]:
    """(``dtype``, ``quantization``) of the configuration."""
    if precision in _DENSE:
        return _DENSE[precision], "none"
    return "auto", precision if precision in ON_LOAD else "auto"


def facts(settings: dict[str, Any], runner: ModelRunner) -> dict[str, Any]:
    """For the report."""
    return {
        "torch": torch.__version__,
        "dtype": settings["precision"],
        "weights": runner.decoder.weights_format,
        "attention": runner.decoder.backend.name,
        "kv_dtype": str(runner.kv_dtype).removeprefix("torch."),
        "threads": settings["threads"],
        "num_kv_blocks": runner.num_blocks,
    }
