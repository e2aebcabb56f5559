"""``warmroot plan MODEL``."""

import json
import os
from argparse import ArgumentTypeError
from collections.abc import Sequence
from dataclasses import replace

from rich.console import Console

from ...actors.models.source import resolve_model
from ...actors.models.spec import read_spec, unit_format
from ...cluster.capacity import CapacityPlan, Needs, plan_capacity, smallest_fit
from ...cluster.config_file import load_config
from ...cluster.kv_formats import KV_FORMATS, KvFormat, kv_format
from ...cluster.parallel_layout import DECODE_TOKENS, ParallelLayout
from .flags import Parser, add_keys, add_model, size
from .plan_drafts import with_drafts
from .plan_report import Step, describe
from .plan_table import show_plan
from .plan_weights import kept_weights

KEYS = (
    "model",
    "revision",
    "dtype",
    "quantization",
    "max_model_len",
    "block_size",
    "gpu_memory_utilization",
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "enable_expert_parallel",
    "expert_parallel_size",
    "num_redundant_experts",
    "max_num_seqs",
    "max_num_batched_tokens",
    "speculative_config",
)


def main(argv: Sequence[str]) -> int:
    """Print the plan; exit code 0 if the model and one full sequence fit, else 1."""
    arguments = _parser().read(argv)
    config = load_config({key: value for key, value in vars(arguments).items() if key in KEYS})
    path = resolve_model(config.model.model, config.model.revision, weights=False)
    spec, stored = read_spec(path), unit_format(path, config.model.quantization)
    layout = ParallelLayout.of(
        spec,
        config.parallel.topology(),
        num_redundant_experts=config.parallel.num_redundant_experts,
        weights=stored,
    )
    weights = kept_weights(config.model, path, spec, arguments.device)
    memory = arguments.memory or machine_memory()
    needs = Needs(
        memory_bytes=int(memory * config.cache.gpu_memory_utilization),
        weights=weights,
        kv_format=kv_format(arguments.kv_cache_dtype, weights.table.name),
        max_model_len=config.model.max_model_len or spec.max_position,
        block_size=config.cache.block_size,
        max_num_seqs=config.scheduler.max_num_seqs,
        step_tokens=config.scheduler.max_num_batched_tokens,
    )

    def planned(fmt: KvFormat) -> CapacityPlan:
        return plan_capacity(layout, with_drafts(replace(needs, kv_format=fmt), config, path, spec, arguments.device))

    plan = planned(needs.kv_format)
    formats = {name: planned(fmt) for name, fmt in KV_FORMATS.items()}
    fit = None if plan.limit is None else smallest_fit(spec, plan.needs, stored)
    # On CPUs activations are float32.
    step = Step(arguments.step_tokens, 4 if arguments.device == "cpu" else weights.table.bits // 8)
    report = {"model": config.model.model, "device": arguments.device, "device_memory": memory}
    report |= describe(plan, formats, step, fit)
    if arguments.json:
        print(json.dumps(report, indent=2))
    else:
        show_plan(report, Console())
    return 0 if plan.limit is None else 1


def _parser() -> Parser:
    parser = Parser(
        "warmroot plan", "Say what each rank of a model holds and sends and how many sequences fit, without loading it."
    )
    add_model(parser)
    add_keys(parser, KEYS)
    parser.add_argument(
        "--kv-cache-dtype",
        choices=("auto", *KV_FORMATS),
        default="auto",
        help="format of cached keys and values; fp8: e4m3; k8v4: keys int8, values int4 (default: auto, 16 bits"
        " unless dtype is float32; CPUs without native kernels cache in fp32)",
    )
    parser.add_argument(
        "--device",
        choices=("cpu", "cuda"),
        default="cpu",
        help="cpu packs weights and computes in float32; cuda keeps weights and activations in dtype (default: cpu)",
    )
    parser.add_argument(
        "--memory", type=size, metavar="SIZE", help="of each device, such as 80GB (default: this machine's)"
    )
    parser.add_argument(
        "--step-tokens",
        type=_positive,
        metavar="N",
        default=DECODE_TOKENS,
        help=f"sequences that decode in the step whose messages are shown (default: {DECODE_TOKENS})",
    )
    parser.add_argument("--json", action="store_true", help="as JSON")
    return parser


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise ArgumentTypeError(f"should be greater than or equal to 1, not {text}")
    return number


def machine_memory() -> int:
    """Bytes of RAM of this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
