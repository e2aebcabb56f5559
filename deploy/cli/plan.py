"""``warmroot plan MODEL``."""

import json
import os
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console

from ...actors.models.source import resolve_model
from ...actors.models.spec import read_spec, stored_format
from ...cluster.capacity import WEIGHT_BYTES, CapacityPlan, Shards, plan_capacity, smallest_fit
from ...cluster.config import ModelConfig
from ...cluster.config_file import load_config
from ...cluster.kv_formats import KV_FORMATS, kv_format
from ...cluster.model_spec import ModelSpec
from .flags import Parser, add_keys, add_model, size
from .plan_table import show_plan

KEYS = ("model", "revision", "dtype", "quantization", "max_model_len", "block_size", "gpu_memory_utilization")


def main(argv: Sequence[str]) -> int:
    """Print the plan; exit code 0 if the model and one full sequence fit, else 1."""
    arguments = _parser().read(argv)
    config = load_config({key: value for key, value in vars(arguments).items() if key in KEYS})
    spec = read_model(config.model.model, config.model.revision)
    weights = weights_format(config.model)
    # On a CPU auto is float16; on a GPU it is the checkpoint's type, two bytes for nearly all.
    dtype = "float16" if config.model.dtype == "auto" else config.model.dtype
    memory = arguments.memory or machine_memory()
    budget: dict[str, Any] = {
        "memory_bytes": int(memory * config.cache.gpu_memory_utilization),
        "dtype": weights,
        "max_model_len": config.model.max_model_len,
        "block_size": config.cache.block_size,
    }
    shards = Shards(tp=arguments.tp, pp=arguments.pp)
    chosen = kv_format(arguments.kv_cache_dtype, dtype)
    plan = plan_capacity(spec, kv_format=chosen, shards=shards, **budget)
    formats = {name: plan_capacity(spec, kv_format=fmt, shards=shards, **budget) for name, fmt in KV_FORMATS.items()}
    fit = None if plan.limit is None else smallest_fit(spec, kv_format=chosen, **budget)
    report = describe(config.model.model, spec, plan, formats, shards, fit)
    report |= {"dtype": weights, "device_memory": memory}
    if arguments.json:
        print(json.dumps(report, indent=2))
    else:
        show_plan(report, Console())
    return 0 if plan.limit is None else 1


def _parser() -> Parser:
    parser = Parser("warmroot plan", "Say what a model needs and how many sequences fit, without loading it.")
    add_model(parser)
    add_keys(parser, KEYS)
    parser.add_argument(
        "--kv-cache-dtype",
        choices=("auto", *KV_FORMATS),
        default="auto",
        help="format of cached keys and values; int8, int4 and k8v4 are planned (default: auto, 16 bits"
        " unless dtype is float32; CPUs without native kernels cache in fp32)",
    )
    parser.add_argument("--tp", "--tensor-parallel-size", "-tp", type=int, default=1, metavar="N", help="ranks a stage")
    parser.add_argument("--pp", "--pipeline-parallel-size", "-pp", type=int, default=1, metavar="N", help="stages")
    parser.add_argument(
        "--memory", type=size, metavar="SIZE", help="of each device, such as 80GB (default: this machine's)"
    )
    parser.add_argument("--json", action="store_true", help="as JSON")
    return parser


def machine_memory() -> int:
    """Bytes of RAM of this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def read_model(model: str, revision: str | None) -> ModelSpec:
    """The facts of a model; a folder needs no more than its config.json. Raises ModelLoadError."""
    return read_spec(resolve_model(model, revision, weights=False))


def weights_format(model: ModelConfig) -> str:
    """What linears are kept as: a key of ``WEIGHT_BYTES``. Raises ModelLoadError."""
    if model.quantization == "int8":
        return "int8"
    if model.dtype != "auto":
        return model.dtype
    if model.quantization == "none":
        return "float16"
    stored = stored_format(resolve_model(model.model, model.revision, weights=False))
    if not stored:
        return "float16"
    return stored if stored in WEIGHT_BYTES else "int8"  # blocks that have no packed form become int8


def describe(
    model: str,
    spec: ModelSpec,
    plan: CapacityPlan,
    formats: dict[str, CapacityPlan],
    shards: Shards,
    fit: Shards | None,
) -> dict[str, Any]:
    """The plan as JSON: the model's facts, the plan itself and its main numbers in every KV format."""
    windows = [window for window in spec.layer_windows if window is not None]
    return {
        "model": model,
        "architecture": spec.architecture,
        "num_layers": spec.num_layers,
        "num_heads": spec.num_heads,
        "num_kv_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "sliding_layers": len(windows),
        "sliding_window": max(windows, default=None),
        **asdict(plan),
        "tp": shards.tp,
        "pp": shards.pp,
        "fits": plan.limit is None,
        "limit": plan.limit,
        "missing_bytes": plan.missing_bytes,
        "smallest_fit": None if fit is None else asdict(fit),
        "kv_formats": {
            name: {
                "served": KV_FORMATS[name].served,
                "kv_token_bytes": other.kv_token_bytes,
                "kv_sequence_bytes": other.kv_sequence_bytes,
                "num_blocks": other.num_blocks,
                "max_sequences": other.max_sequences,
            }
            for name, other in formats.items()
        },
    }
