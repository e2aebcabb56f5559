"""``warmroot bench weights``: forms of the weights side by side: bytes, load time, speed and quality."""

import os
import tempfile
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ...actors.models.source import resolve_model
from ...cluster.weight_formats import ON_LOAD
from ...router.tokenizer import Tokenizer
from ..cli.flags import Parser
from .contender import Contender
from .engine import numbers, some_of
from .lineup import Entry, lineup
from .precision import LLAMA
from .quality import QualitySizes, Scores, compare, score, text_facts, windows
from .report import Report
from .scenarios import measure_streams, warm_up
from .weights_bytes import WeightBytes, weight_bytes
from .weights_checkpoints import CHECKPOINTS, checkpoint
from .workload import OUTPUT_TOKENS, PROMPT_TOKENS, LengthRange, Workloads

REFERENCE = "fp16"
FORMS = (REFERENCE, "int8", "int4", "int4-g128", "gptq", "awq")
_MIN_INT8_SPEED, _MAX_INT8_PERPLEXITY = 1.0, 1.01
_MAX_INT4_PERPLEXITY, _MAX_INT4_BYTES = 1.08, 0.35
_QUICK_LENGTHS = (LengthRange(16, 32), LengthRange(4, 8))


def main(argv: Sequence[str]) -> int:
    """Measure and report. Returns 1 if a bar does not hold (never with ``--quick``)."""
    options = _parse(argv)
    with Report("weights", vars(options), json_only=options.json) as report, ExitStack() as stack:
        scratch = Path(options.scratch or stack.enter_context(tempfile.TemporaryDirectory(prefix="warmroot-bench-")))
        scratch.mkdir(parents=True, exist_ok=True)
        options.scratch = scratch
        _Run(options, report, stack).run()
        status = report.finish()
    return 0 if options.quick else status


def _parse(argv: Sequence[str]) -> Namespace:
    parser = Parser("warmroot bench weights", "Forms of the weights side by side: bytes, load time, speed and quality.")
    add = parser.add_argument
    add(
        "model", nargs="?", default="smollm2", help="folder, GGUF file, hub id or smollm2; not quantised by GPTQ or AWQ"
    )
    add("--forms", type=some_of(*FORMS), default=FORMS, help=f"some of {', '.join(FORMS)}; fp16 always takes part")
    for name in CHECKPOINTS:
        add(f"--{name}", metavar="DIR", help=f"the model as {name.upper()} checkpoint; default: made here, in minutes")
    add("--group-size", type=int, default=128, help="of checkpoints made here; AWQ takes the next that fits")
    add("--samples", type=int, default=64, help="calibration texts for checkpoints made here")
    add("--threads", type=int, default=os.cpu_count(), help="of every engine; default: all cores")
    add("--streams", type=numbers, default=(1, 8, 32), help="concurrencies, commas between")
    add("--repeats", type=int, default=3, help="rounds, of which medians are reported")
    add("--windows", type=int, default=16, help="windows of the text that is scored")
    add("--window", type=int, default=512, help="tokens of a window, all but the first of which are scored")
    add("--seed", type=int, default=0, help="of the workloads")
    add("--peers", choices=("all", "none"), default="all", help="all: llama.cpp where it is installed")
    add("--llama-python", help="interpreter that has llama-cpp-python")
    add("--llama-dtype", type=some_of(*LLAMA), default=("q8_0", "q4_0"), help="its precisions")
    add("--scratch", help="folder that keeps what is made here; default: a temporary one")
    add("--quick", action="store_true", help="tiny workloads: shows that it runs, measures nothing")
    add("--json", action="store_true", help="only the JSON on stdout, the tables on stderr")
    options = parser.read(argv)
    if options.quick:
        options.repeats, options.windows, options.window = 1, 1, 64
    return options


class _Run:
    """One measurement; what it finds goes to the report."""

    def __init__(self, options: Namespace, report: Report, stack: ExitStack) -> None:
        self._options = options
        self._report = report
        self._stack = stack
        self._model = resolve_model(options.model).absolute()
        self._encode = Tokenizer.from_path(self._model).encode
        cache = stack.enter_context(tempfile.TemporaryDirectory(dir=options.scratch))
        self._environment = {"WARMROOT_CACHE_DIR": cache}
        """Packed weights are kept here: empty at first."""
        self._lengths = _QUICK_LENGTHS if options.quick else (PROMPT_TOKENS, OUTPUT_TOKENS)

    def run(self) -> None:
        """Everything."""
        entries = self._entries()
        sizes = self._bytes([entry for entry in entries if entry.is_ours])
        load_s = {entry.name: self._first_load(entry) for entry in entries if entry.is_ours}
        contenders = {entry.name: self._start(entry) for entry in entries}
        self._loads(load_s, contenders)
        perplexity = self._quality(contenders)
        self._streams(list(contenders.values()))
        self._hold(sizes, perplexity)

    def _entries(self) -> list[Entry]:
        """Ours by form, then llama.cpp's by precision."""
        options = self._options
        takes_peers = options.peers == "all" and self._model.suffix == ".gguf"
        has_llama = options.llama_python is not None or find_spec("llama_cpp") is not None
        forms = dict.fromkeys((REFERENCE, *options.forms))
        common = {
            "dtype": [form for form in forms if form == REFERENCE or form in ON_LOAD],
            "peers": "llama.cpp" if takes_peers and has_llama else "none",
            "max_model_len": -(-max(self._lengths[0].high + self._lengths[1].high, options.window) // 64) * 64,
            "max_num_seqs": max(options.streams),
            "vllm_python": None,
        }
        entries = lineup(Namespace(**vars(options) | common), self._model, options.scratch)
        ours = {entry.precision: entry for entry in entries if entry.is_ours}
        for form in forms:
            if form in CHECKPOINTS:
                ours[form] = self._quantised(ours[REFERENCE], form)
        return [ours[form] for form in forms] + [entry for entry in entries if not entry.is_ours]

    def _quantised(self, entry: Entry, form: str) -> Entry:
        folder = checkpoint(form, self._model, self._options, self._report.note)
        return replace(entry, precision=form, settings={**entry.settings, "model": str(folder), "precision": form})

    def _bytes(self, entries: Sequence[Entry]) -> dict[str, WeightBytes]:
        """By form."""
        found = {entry.precision: weight_bytes(Path(entry.settings["model"]), entry.precision) for entry in entries}
        half = found[REFERENCE]
        self._report.result["bytes"] = {
            form: {**size._asdict(), "linears_share": size.linears / half.linears, "share": size.total / half.total}
            for form, size in found.items()
        }
        rows = [
            (
                form,
                f"{size.linears / 1e6:,.1f} MB",
                f"{size.linears / half.linears:.4f}",
                f"{size.total / 1e6:,.1f} MB",
                f"{size.total / half.total:.4f}",
            )
            for form, size in found.items()
        ]
        columns = ("", "layers' linears", f"of {REFERENCE}", "whole model", f"of {REFERENCE}")
        self._report.table("Bytes in memory, scales included", columns, rows)
        return found

    def _first_load(self, entry: Entry) -> float:
        """Seconds with nothing packed: what the first start on a machine pays."""
        contender = entry.start(self._report.note, self._environment)
        contender.close()
        return contender.facts["load_s"]

    def _start(self, entry: Entry) -> Contender:
        contender = entry.start(self._report.note, self._environment)
        self._stack.callback(contender.close)
        return contender

    def _loads(self, first: dict[str, float], contenders: dict[str, Contender]) -> None:
        seconds = {name: contender.facts["load_s"] for name, contender in contenders.items()}
        self._report.result["contenders"] = {name: contender.facts for name, contender in contenders.items()}
        self._report.result["load_s"] = {
            name: {"first": first.get(name), "again": again} for name, again in seconds.items()
        }
        rows = [
            (name, f"{first[name]:.2f} s" if name in first else "", f"{again:.2f} s") for name, again in seconds.items()
        ]
        self._report.table("Loading", ("", "first time", "packed before"), rows)

    def _quality(self, contenders: dict[str, Contender]) -> dict[str, float]:
        """Perplexity by contender."""
        texts = windows(self._encode, QualitySizes(self._options.windows, self._options.window))
        scores: dict[str, Scores] = {}
        for name, contender in contenders.items():
            self._report.note(f"scoring {name}")
            scores[name] = score(contender, texts)
        reference = next(iter(scores.values()))
        found = {name: compare(ours, reference) for name, ours in scores.items()}
        self._report.result["quality_text"] = text_facts(texts)
        self._report.result["quality"] = found
        rows = [
            (
                name,
                f"{facts['perplexity']:.4f}",
                f"{100 * (facts['perplexity_ratio'] - 1):+.2f} %",
                f"{facts['argmax_agreement']:.2%}",
            )
            for name, facts in found.items()
        ]
        title = f"Quality, {len(reference.logprobs)} tokens"
        self._report.table(title, ("", "perplexity", f"over {REFERENCE}", "same argmax"), rows)
        return {name: facts["perplexity_ratio"] for name, facts in found.items()}

    def _streams(self, contenders: list[Contender]) -> None:
        options, workloads = self._options, Workloads(self._encode, self._options.seed)
        warm_up(contenders, workloads, options.streams)
        points: list[dict[str, Any]] = []
        for concurrency in options.streams:
            count = 2 * concurrency if concurrency < 32 else concurrency
            rounds = [workloads.distinct(count, *self._lengths) for _ in range(options.repeats)]
            points.append(measure_streams(self._report, contenders, rounds, concurrency))
        self._report.result["streams"] = points

    def _hold(self, sizes: dict[str, WeightBytes], perplexity: dict[str, float]) -> None:
        for name, value, wanted, at_least in self._verdicts(sizes, perplexity):
            self._report.bar(name, value, wanted, at_least=at_least)

    def _verdicts(
        self, sizes: dict[str, WeightBytes], perplexity: dict[str, float]
    ) -> Iterator[tuple[str, float, float, bool]]:
        """Name, value, wanted, whether that is the least."""
        half, int8 = f"warmroot {REFERENCE}", "warmroot int8"
        if int8 in perplexity:
            yield f"perplexity, int8 / {REFERENCE}", perplexity[int8], _MAX_INT8_PERPLEXITY, False
            for point in self._report.result["streams"]:
                ratio = point["ratios"][int8][half]["output"]
                yield f"int8 / {REFERENCE}, {point['concurrency']} streams", ratio, _MIN_INT8_SPEED, True
        made = [form for form in CHECKPOINTS if f"warmroot {form}" in perplexity]
        if made:
            best = min(made, key=lambda form: perplexity[f"warmroot {form}"])
            yield f"perplexity, {best} / {REFERENCE}", perplexity[f"warmroot {best}"], _MAX_INT4_PERPLEXITY, False
        for form in made:
            share = sizes[form].linears / sizes[REFERENCE].linears
            yield f"bytes of linears, {form} / {REFERENCE}", share, _MAX_INT4_BYTES, False
