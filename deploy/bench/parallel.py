"""``warmroot bench parallel``: a model cut over ranks beside the same model in one process, with as many threads."""

import os
import random
import tempfile
from argparse import Namespace
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from ...actors.models.source import resolve_model
from ...actors.models.spec import read_spec
from ...cluster.topology import Topology
from ..cli.flags import Parser
from . import precision
from .contender import Contender
from .engine import numbers, some_of
from .metrics import median_ratio
from .parallel_checkpoint import write_sparse_model
from .parallel_split import GangSplit, byte_error, median_split
from .report import Report

CUTS = ("tp", "pp", "ep")
_WHOLE = "in process"
_MIN_THROUGHPUT, _MAX_CONTROL, _MAX_BUBBLE = 0.75, 0.05, 0.15
_EXACT = ("all_reduce", "all_gather", "hop", "counts")
"""Kinds whose bytes do not depend on what is routed where."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A way to cut the model; None: not at all, and no gang."""

    name: str
    topology: Topology | None

    @property
    def num_ranks(self) -> int:
        """Processes that compute."""
        return 1 if self.topology is None else self.topology.world_size

    @property
    def stages(self) -> list[int]:
        """Of each rank."""
        return [] if self.topology is None else [place.stage for place in self.topology.places()]


def main(argv: Sequence[str]) -> int:
    """Measure and report. Returns 1 if a bar does not hold (never with ``--quick``)."""
    options = _parse(argv)
    with Report("parallel", vars(options), json_only=options.json) as report, ExitStack() as stack:
        dense = [cut for cut in options.only if cut != "ep"]
        if dense:
            report.result["dense"] = _Race(options, report, resolve_model(options.model), options.dtype).run(dense)
        if "ep" in options.only:
            scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="warmroot-bench-")))
            sizes = {"num_experts": 4, "hidden": 64} if options.quick else {}
            model = write_sparse_model(scratch / "sparse", options.seed, **sizes)
            report.result["sparse"] = _Race(options, report, model, "fp32").run(["ep"])
        status = report.finish()
    return 0 if options.quick else status


def _parse(argv: Sequence[str]) -> Namespace:
    parser = Parser(
        "warmroot bench parallel", "Tensor, pipeline and expert parallelism beside one process with as many threads."
    )
    add = parser.add_argument
    add("model", nargs="?", default="smollm2", help="folder, GGUF file, hub id or smollm2; ep has a model of its own")
    add("--dtype", choices=precision.OURS, default="file", help="precision of the weights")
    add("--threads", type=int, default=os.cpu_count(), help="of all ranks together; default: all cores")
    add("--only", type=some_of(*CUTS), default=CUTS, help=f"some of {', '.join(CUTS)}")
    add("--streams", type=numbers, default=(1, 16), help="sequences that decode, commas between")
    add("--context", type=int, default=128, help="tokens of each prompt")
    add("--steps", type=int, default=64, help="steps in a window")
    add("--repeats", type=int, default=9, help="windows of each, in turn")
    add("--seed", type=int, default=0, help="of prompts and experts")
    add("--quick", action="store_true", help="tiny workloads: shows that it runs, measures nothing")
    add("--json", action="store_true", help="only the JSON on stdout, the tables on stderr")
    options = parser.read(argv)
    if options.quick:
        options.repeats, options.steps, options.context = 1, 4, 16
    return options


def lineup(cuts: Sequence[str]) -> list[Entry]:
    """One process, one rank, and two ranks for each of ``cuts``."""
    two = [Entry(f"{cut} 2", Topology(**{cut: 2})) for cut in cuts]
    return [Entry(_WHOLE, None), Entry("1 rank", Topology()), *two]


class _Race:
    """All ways to cut one model, in turn."""

    def __init__(self, options: Namespace, report: Report, model: Path, dtype: str) -> None:
        self._options = options
        self._report = report
        self._model = model
        self._dtype = precision.named(dtype, model)
        self._vocabulary = read_spec(model).vocab_size
        self._random = random.Random(options.seed)

    def run(self, cuts: Sequence[str]) -> dict[str, Any]:
        """For the JSON."""
        entries = lineup(cuts)
        with ExitStack() as stack:
            contenders = [self._start(entry, stack) for entry in entries]
            points = {str(streams): self._point(entries, contenders, streams) for streams in self._options.streams}
        return {
            "model": self._model.name,
            "precision": self._dtype,
            "contenders": {contender.name: contender.facts for contender in contenders},
            "streams": points,
        }

    def _start(self, entry: Entry, stack: ExitStack) -> Contender:
        options = self._options
        self._report.note(f"starting {entry.name} of {self._model.name}, {self._dtype}")
        length = options.context + 4 * options.steps + 256
        most = max(options.streams)
        settings = {
            "model": str(self._model),
            "precision": self._dtype,
            "threads": max(1, options.threads // entry.num_ranks),
            "max_model_len": length,
            "max_num_seqs": most,
            "num_kv_blocks": 1 + most * -(-length // 16),
            "topology": None if entry.topology is None else asdict(entry.topology),
        }
        contender = Contender(entry.name, "gang_peer", settings)
        stack.callback(contender.close)
        return contender

    def _point(self, entries: list[Entry], contenders: list[Contender], streams: int) -> dict[str, Any]:
        windows = self._windows(contenders, streams)
        rates = {name: [window["num_tokens"] / window["wall_s"] for window in turns] for name, turns in windows.items()}
        figures: dict[str, Any] = {}
        for entry in entries:
            figures[entry.name] = {
                "tokens_per_s": median(rates[entry.name]),
                "best_tokens_per_s": max(rates[entry.name]),
                "ratio": median_ratio(rates[entry.name], rates[_WHOLE]),
                "rounds_tokens_per_s": rates[entry.name],
                **(self._gang(entry, windows[entry.name]) if entry.topology is not None else {}),
            }
        self._tables(figures, streams)
        self._bars(entries, figures, streams)
        return figures

    def _windows(self, contenders: list[Contender], streams: int) -> dict[str, list[dict[str, Any]]]:
        """Every round's prompts decode in every contender; who begins rotates. The first round warms up."""
        options = self._options
        windows: dict[str, list[dict[str, Any]]] = {contender.name: [] for contender in contenders}
        for turn in range(options.repeats + 1):
            prompts = [
                [self._random.randrange(self._vocabulary) for _ in range(options.context)] for _ in range(streams)
            ]
            first = turn % len(contenders)
            for contender in (*contenders[first:], *contenders[:first]):
                windows[contender.name].append(contender.call("decode", prompts=prompts, num_steps=options.steps))
        return {name: turns[1:] for name, turns in windows.items()}

    def _gang(self, entry: Entry, windows: list[dict[str, Any]]) -> dict[str, Any]:
        splits = [GangSplit.of(window, entry.stages) for window in windows]
        split = median_split(splits)
        return {
            "split": asdict(split),
            "busy_shares": split.busy_shares,
            "bubble_share": median(split.bubble_share for split in splits),
            "control_share": median(split.control_share for split in splits),
            "traffic": windows[-1]["traffic"],
            "byte_error": max(byte_error(window["traffic"], _EXACT) for window in windows),
        }

    def _tables(self, figures: dict[str, Any], streams: int) -> None:
        title = f"{self._dtype}, {streams} stream{'s' if streams > 1 else ''}: ms of a step"
        columns = ("", "tokens/s", "ratio", "step", "compute", "communication", "bubble", "control", "idle", "CPU")
        rows: list[tuple[str, ...]] = []
        for name, figure in figures.items():
            rows.append((name, f"{figure['tokens_per_s']:.1f}", f"{figure['ratio']:.3f}", *[""] * 7))
            if "split" in figure:
                step = f"{figure['split']['step_ms']:.2f}"
                rows += [
                    (f"  rank {number}", "", "", step, *(f"{value:.2f}" for value in rank.values()))
                    for number, rank in enumerate(figure["split"]["ranks"])
                ]
        self._report.table(title, columns, rows)

    def _bars(self, entries: list[Entry], figures: dict[str, Any], streams: int) -> None:
        bar, most = self._report.bar, max(self._options.streams)
        for entry in entries:
            figure = figures[entry.name]
            if entry.topology is None or entry.num_ranks == 1:
                continue
            if entry.topology.ep == 1 and streams == most:
                bar(f"{entry.name}: tokens/s at {streams} streams / {_WHOLE}", figure["ratio"], _MIN_THROUGHPUT)
            if entry.topology.pp > 1 and streams == most:
                bar(f"{entry.name}: bubble at {streams} streams", figure["bubble_share"], _MAX_BUBBLE, at_least=False)
            if entry.topology.tp > 1 and streams == 1:
                bar(f"{entry.name}: control plane, 1 stream", figure["control_share"], _MAX_CONTROL, at_least=False)
            if entry.topology.ep == 1:
                bar(f"{entry.name}: bytes, {streams} streams", figure["byte_error"], 0.0, at_least=False)
