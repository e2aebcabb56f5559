"""``warmroot bench speculative``: every way to draft beside none, for one stream and for many."""

import os
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any

import yaml

from ...actors.models.source import resolve_model
from ...actors.runner.threads import use_threads
from ...cluster.sampling_params import SamplingParams
from ...cluster.speculative_config import SpeculativeConfig
from ...router.chat_template import ChatTemplate
from ...router.tokenizer import Tokenizer
from ..cli.flags import Parser
from . import precision
from .engine import numbers
from .report import Report
from .speculative_engines import Drafted, Drafting, Run

OFF = "off"
COPYING = ("summarise", "edit", "extract")
FREE = "free"
_TRAINED = {"draft_model": "--draft-model", "medusa": "--medusa", "recurrent": "--recurrent"}
"""Methods that need weights, and the flags that name them."""
_SAMPLED = "free, temperature 0.7"
_COPYING_BAR, _FREE_BAR, _MANY_BAR = 1.5, 1.3, 0.97

Prompts = Mapping[str, Sequence[Sequence[int]]]
"""Token ids, by kind."""


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests that are run one after the other, or all at once."""

    name: str
    batches: Sequence[Sequence[Sequence[int]]]
    """Prompts that run together."""
    params: SamplingParams


def main(argv: Sequence[str]) -> int:
    """Measure and report. Returns 1 if a bar does not hold (never with ``--quick``)."""
    options = _parse(argv)
    with Report("speculative", vars(options), json_only=options.json) as report:
        use_threads(options.threads)
        path = resolve_model(options.model)
        prompts = _prompts(Tokenizer.from_path(path), 1 if options.quick else None)
        race = _Race(_engines(options, path, report), options, report)
        for workload in _workloads(options, prompts):
            race.run(workload)
        race.hold_bars()
        status = report.finish()
    return 0 if options.quick else status


def _parse(argv: Sequence[str]) -> Namespace:
    parser = Parser("warmroot bench speculative", "Speculative decoding on and off, by every method, in turn.")
    add = parser.add_argument
    add("model", nargs="?", default="smollm2", help="folder, GGUF file, hub id or smollm2")
    add("--draft-model", metavar="DIR", help="a drafting model, as of warmroot train-draft (default: none takes part)")
    add("--medusa", metavar="DIR", help="Medusa heads, as of warmroot train-medusa (default: none take part)")
    add("--recurrent", metavar="DIR", help="a recurrent head, as of warmroot train-medusa --recurrent (default: none)")
    add("--dtype", choices=precision.OURS, default="fp16", help="precision of the weights")
    add("--streams", type=numbers, default=(1, 32), help="requests at a time, commas between")
    add("--max-tokens", type=int, default=128, help="of the longest answer")
    add("--rounds", type=int, default=5, help="of all engines in turn, after one that is not counted")
    add("--threads", type=int, default=os.cpu_count(), help="default: all cores")
    add("--quick", action="store_true", help="tiny workloads: shows that it runs, measures nothing")
    add("--json", action="store_true", help="only the JSON on stdout, the tables on stderr")
    options = parser.read(argv)
    if options.quick:
        options.rounds, options.max_tokens, options.streams = 1, 12, tuple(min(n, 4) for n in options.streams)
    return options


def _prompts(tokenizer: Tokenizer, most: int | None) -> Prompts:
    """At most so many of each kind, as a user's turn where the model has such."""
    template = tokenizer.chat_template
    chat = ChatTemplate(template, tokenizer.special_tokens, now=datetime.now) if template else None
    kinds: dict[str, list[str]] = yaml.safe_load((Path(__file__).parent / "speculative_prompts.yaml").read_text())

    def encode(text: str) -> list[int]:
        shown = text if chat is None else chat.render([{"role": "user", "content": text.strip()}])
        return tokenizer.encode(shown, add_special_tokens=chat is None)

    return {kind: [encode(text) for text in islice(texts, most)] for kind, texts in kinds.items()}


def methods(options: Namespace) -> dict[str, SpeculativeConfig | None]:
    """Those that take part, by name; first none."""

    def config(method: str, most: int, model: str | None = None) -> SpeculativeConfig:
        values: dict[str, Any] = {"method": method, "num_speculative_tokens": most}
        if model is not None:
            values["model"] = str(resolve_model(model))
        # A few tokens tell nothing about what pays.
        return SpeculativeConfig.model_validate({**values, "adaptive": not options.quick})

    found: dict[str, SpeculativeConfig | None] = {
        OFF: None,
        "ngram": config("ngram", 8),
        "layer_skip": config("layer_skip", 4),
    }
    if options.draft_model is not None:
        found["draft_model"] = config("draft_model", 5, options.draft_model)
    if options.medusa is not None:
        found["medusa"] = config("medusa", 8, options.medusa)
    if options.recurrent is not None:
        found["recurrent"] = config("medusa", 5, options.recurrent)
    return found


def _engines(options: Namespace, path: Path, report: Report) -> list[Drafting]:
    found = methods(options)
    report.result["skipped"] = {name: f"no {flag}" for name, flag in _TRAINED.items() if name not in found}
    engines: list[Drafting] = []
    for name, speculation in found.items():
        report.note(f"loading the model: {name}")
        engines.append(Drafting(name, path, options.dtype, speculation, streams=max(options.streams)))
    return engines


def _workloads(options: Namespace, prompts: Prompts) -> list[Workload]:
    greedy = SamplingParams(temperature=0.0, max_tokens=options.max_tokens, seed=0)
    sampled = SamplingParams(temperature=0.7, max_tokens=options.max_tokens, seed=0)
    everything = [prompt for kind in prompts.values() for prompt in kind]
    found: list[Workload] = []
    for streams in options.streams:
        if streams == 1:
            found += [Workload(kind, [[prompt] for prompt in own], greedy) for kind, own in prompts.items()]
            found.append(Workload(_SAMPLED, [[prompt] for prompt in prompts[FREE]], sampled))
        else:
            together = [everything[index % len(everything)] for index in range(streams)]
            found.append(Workload(f"{streams} streams", [together], greedy))
    return found


class _Race:
    """Engines in turn. What is compared are neighbours in time."""

    def __init__(self, engines: Sequence[Drafting], options: Namespace, report: Report) -> None:
        self._engines = engines
        self._rounds: int = options.rounds
        self._report = report
        self._ratios: dict[str, dict[str, float]] = {}
        """Tokens/s over those without drafts, by workload and method."""
        self._equal = [0, 0]
        """Greedy outputs that are equal, and all."""
        report.result["workloads"] = {}

    def run(self, workload: Workload) -> None:
        """All rounds, after one in which the engines learn how long steps take."""
        rates: dict[str, list[float]] = {engine.name: [] for engine in self._engines}
        drafted: dict[str, Drafted] = {}
        outputs: dict[str, list[list[int]]] = {}
        for number in range(self._rounds + 1):
            self._report.note(f"{workload.name}: round {number} of {self._rounds}")
            for engine in _rotated(self._engines, number):
                before = engine.load()
                runs = [engine.run(batch, workload.params) for batch in workload.batches]
                if number:
                    rates[engine.name].append(_rate(runs))
                drafted[engine.name] = Drafted.between(before, engine.load())
                outputs[engine.name] = [output for run in runs for output in run.outputs]
        equal = self._compare(workload, outputs)
        self._ratios[workload.name] = {
            name: median(on / off for on, off in zip(values, rates[OFF], strict=True)) for name, values in rates.items()
        }
        self._tell(workload.name, rates, drafted, equal)

    def _compare(self, workload: Workload, outputs: Mapping[str, list[list[int]]]) -> dict[str, float | None]:
        """Share of greedy outputs that are those without drafts, by method; drawn ones need not be."""
        if workload.params.temperature:
            return dict.fromkeys(outputs)
        shares: dict[str, float | None] = {}
        for name, found in outputs.items():
            same = sum(one == other for one, other in zip(found, outputs[OFF], strict=True))
            shares[name] = same / len(found)
            self._equal[0] += same
            self._equal[1] += len(found)
        return shares

    def _tell(
        self,
        name: str,
        rates: Mapping[str, list[float]],
        drafted: Mapping[str, Drafted],
        equal: Mapping[str, float | None],
    ) -> None:
        figures = {
            method: {
                "tokens_per_s": median(values),
                "ratio": self._ratios[name][method],
                "equal_outputs": equal[method],
                **drafted[method].to_json(),
            }
            for method, values in rates.items()
        }
        self._report.result["workloads"][name] = figures
        rows = [_row(method, values) for method, values in figures.items()]
        self._report.table(name, ("", "tok/s", "times off", "accepted", "per draft", "equal"), rows)

    def hold_bars(self) -> None:
        """What the methods have to reach."""
        report, trained = self._report, [engine.name for engine in self._engines if engine.name in _TRAINED]
        copying = [self._ratios[kind]["ngram"] for kind in COPYING if kind in self._ratios]
        if copying:
            report.bar("ngram / off, summarise, edit and extract", median(copying), _COPYING_BAR)
        if FREE in self._ratios and trained:
            best = max(self._ratios[FREE][name] for name in trained)
            report.bar("best trained method / off, free text", best, _FREE_BAR)
        for workload, ratios in self._ratios.items():
            if workload.endswith(" streams"):
                for name in ratios.keys() - {OFF}:
                    report.bar(f"{name} / off, {workload}", ratios[name], _MANY_BAR)
        same, outputs = self._equal
        report.bar("equal greedy outputs", same / outputs if outputs else 1.0, 1.0)


def _rotated(engines: Sequence[Drafting], number: int) -> list[Drafting]:
    """Others begin in each round."""
    first = number % len(engines)
    return [*engines[first:], *engines[:first]]


def _rate(runs: Sequence[Run]) -> float:
    """Output tokens/s of runs one after the other."""
    return sum(len(output) for run in runs for output in run.outputs) / sum(run.seconds for run in runs)


def _row(name: str, figures: Mapping[str, Any]) -> tuple[str, ...]:
    def share(key: str) -> str:
        return "" if figures[key] is None else f"{figures[key]:.2f}"

    return (
        name,
        f"{figures['tokens_per_s']:.1f}",
        share("ratio"),
        share("acceptance_rate"),
        share("accepted_per_draft"),
        share("equal_outputs"),
    )
