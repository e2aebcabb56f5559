"""``warmroot bench curves``: what decoding and prefill cost as batch, context, chunk and threads grow."""

import os
import tempfile
from argparse import Namespace
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

from ...actors.models.source import resolve_model
from ...cluster.errors import ConfigError
from ..cli.flags import Parser
from . import precision
from .contender import Contender
from .engine import numbers, some_of
from .lineup import our_entry
from .report import Report

_DEFAULT_PLOT = "curves.png"
_MISSING = "matplotlib is missing: pip install 'warmroot[bench]'"


@dataclass(frozen=True, slots=True, kw_only=True)
class CurveSizes:
    """The points. Lengths in tokens."""

    batches: tuple[int, ...]
    batch_context: int
    """Context at which the batch grows."""
    contexts: tuple[int, ...]
    context_batches: tuple[int, ...]
    """Batches at which the context grows."""
    chunks: tuple[int, ...]
    seconds: float
    """Time that each point is measured for, at least a few steps."""


FULL = CurveSizes(
    batches=(1, 2, 4, 8, 16, 32, 64),
    batch_context=320,
    contexts=(128, 512, 2048, 8192),
    context_batches=(1, 8),
    chunks=(16, 64, 128, 256, 512, 1024, 2048),
    seconds=0.5,
)
QUICK = CurveSizes(
    batches=(1, 2), batch_context=48, contexts=(48, 64), context_batches=(1,), chunks=(16, 32), seconds=0.01
)


def main(argv: Sequence[str]) -> int:
    """Measure and report; the plot is drawn if matplotlib is installed."""
    options = _parse(argv)
    plot = _plot_path(options)
    sizes = QUICK if options.quick else FULL
    with Report("curves", vars(options), json_only=options.json) as report, ExitStack() as stack:
        if plot is None:
            report.note(f"no plot: {_MISSING}")
        model = resolve_model(options.model)
        scratch = Path(options.scratch or stack.enter_context(tempfile.TemporaryDirectory(prefix="warmroot-bench-")))
        curves = [
            _measure(options, sizes, report, model, scratch, name, threads)
            for threads in options.threads
            for name in options.dtype
        ]
        report.result["curves"] = curves
        _tables(report, curves)
        if plot is not None:
            from .plot import draw

            draw(curves, plot)
            report.result["plot"] = str(plot)
            report.note(f"drawn: {plot}")
        return report.finish()


def _parse(argv: Sequence[str]) -> Namespace:
    parser = Parser(
        "warmroot bench curves", "What decoding and prefill cost as batch, context, chunk and threads grow."
    )
    add = parser.add_argument
    add("model", nargs="?", default="smollm2", help="folder, GGUF file, hub id or smollm2")
    add("--dtype", type=some_of(*precision.OURS), default=("fp16",), help=", ".join(precision.OURS))
    cores = os.cpu_count() or 1
    add("--threads", type=numbers, default=tuple(dict.fromkeys((1, cores))), help="default: one, and all cores")
    add("--plot", help=f"PNG file to draw; default: {_DEFAULT_PLOT} if matplotlib is installed")
    add("--llama-python", help="interpreter that has llama-cpp-python: converts to q8_0, q4_0 and q4_1")
    add("--seed", type=int, default=0, help="of the prompts")
    add("--scratch", help="folder that keeps converted models; default: a temporary one")
    add("--quick", action="store_true", help="a few tiny points: shows that it runs, measures nothing")
    add("--json", action="store_true", help="only the JSON on stdout, the tables on stderr")
    return parser.read(argv)


def _plot_path(options: Namespace) -> Path | None:
    """Where to draw; None without matplotlib. Raises ConfigError if a plot was asked for."""
    if find_spec("matplotlib") is not None:
        return Path(options.plot or _DEFAULT_PLOT)
    if options.plot:
        raise ConfigError(f"--plot: {_MISSING}", param="plot")
    return None


def _measure(
    options: Namespace, sizes: CurveSizes, report: Report, model: Path, scratch: Path, name: str, threads: int
) -> dict[str, Any]:
    """All points of one precision in a process with so many threads."""
    common = {"threads": threads, "max_num_seqs": max(sizes.batches), "max_model_len": None, "seed": options.seed}
    entry = our_entry(options, common, name, model, scratch)
    contender = replace(entry, module="curve_peer").start(report.note, seconds=sizes.seconds)
    try:
        return {
            "precision": entry.precision,
            "threads": threads,
            "facts": contender.facts,
            "batch": [_decode(contender, batch, sizes.batch_context) for batch in sizes.batches],
            "context": [
                _decode(contender, batch, context)
                for batch in sizes.context_batches
                for context in sizes.contexts
                if context <= contender.facts["context"]
            ],
            "prefill": [_prefill(contender, chunk) for chunk in sizes.chunks],
        }
    finally:
        contender.close()


def _decode(contender: Contender, batch: int, context: int) -> dict[str, Any]:
    return {"batch": batch, "context": context, **_point(contender.call("decode", batch=batch, context=context), batch)}


def _prefill(contender: Contender, chunk: int) -> dict[str, Any]:
    return {"chunk": chunk, **_point(contender.call("prefill", length=chunk), chunk)}


def _point(moments: list[float] | None, tokens: int) -> dict[str, Any]:
    """Median of the steps; nulls where KV memory has no room for the point."""
    if moments is None:
        return {"step_s": None, "tokens_per_s": None, "steps": 0}
    step = median(moments)
    return {"step_s": step, "tokens_per_s": tokens / step, "steps": len(moments)}


def _tables(report: Report, curves: list[dict[str, Any]]) -> None:
    for kind, title, axis in (
        ("batch", "decode tokens/s against batch", "batch"),
        ("context", "decode tokens/s against context (batch × tokens)", "context"),
        ("prefill", "prefill tokens/s against chunk", "chunk"),
    ):
        points = curves[0][kind]
        heads = [f"{point['batch']}×{point[axis]}" if kind == "context" else str(point[axis]) for point in points]
        rows = [
            (_label(curve), *("-" if p["tokens_per_s"] is None else f"{p['tokens_per_s']:.0f}" for p in curve[kind]))
            for curve in curves
        ]
        report.table(title, ("", *heads), rows)


def _label(curve: dict[str, Any]) -> str:
    return f"{curve['precision']}, {curve['threads']} thread{'s' if curve['threads'] > 1 else ''}"
