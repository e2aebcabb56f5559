"""One run of ``bench engine``: heat after heat, every scenario in each, and the bars."""

from argparse import Namespace
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

from .bars import Verdict, shared_prefix_bars, stream_bars, ttft_bars
from .contender import Contender
from .lineup import Entry, Heat, heats, start_all
from .quality import Scores, compare, score, text_facts, windows
from .report import Report
from .scenarios import (
    Sizes,
    measure_shared_prefix,
    measure_step,
    measure_streams,
    measure_ttft,
    measure_zero_hit,
    warm_up,
)
from .workload import Encode, LengthRange, Workloads

SCENARIOS = ("streams", "ttft", "shared_prefix", "zero_hit", "quality", "step")
_SHARED_SPEEDUP, _ZERO_HIT_COST = 5.0, 0.02
_MIN_AGREEMENT, _MAX_PERPLEXITY = 0.999, 1.01
_MAX_OVERHEAD = 0.10
_TTFT_OUTPUT = LengthRange(2, 2)


class Race:
    """Measures a line-up; what it finds goes to the report."""

    def __init__(self, options: Namespace, sizes: Sizes, report: Report, workloads: Workloads, encode: Encode) -> None:
        self._options = options
        self._sizes = sizes
        self._report = report
        self._workloads = workloads
        self._encode = encode
        self._texts: list[list[int]] = []
        self._reference: Scores | None = None
        self._half_perplexity: float | None = None
        """Of our 16-bit weights, which 8-bit ones are held against."""
        self._fastest: dict[int, tuple[float, Entry]] = {}
        """Of all peers so far, by concurrency: output tokens/s."""

    def run(self, entries: Sequence[Entry]) -> None:
        """Every scenario that is asked for."""
        result = self._report.result
        if "zero_hit" in self._options.scenarios:
            result["zero_hit"] = self._zero_hit(next(entry for entry in entries if entry.is_ours))
        if "quality" in self._options.scenarios:
            result["quality_text"] = self._score_reference(entries)
        result["heats"] = {heat.name: self._heat(heat, entries) for heat in heats(entries)}

    def _heat(self, heat: Heat, entries: Sequence[Entry]) -> dict[str, Any]:
        """All scenarios with the contenders of one class, which live only that long: memory is not for all at once."""
        if heat.bits == 8:
            heat = Heat(heat.bits, [*heat.entries, *self._guests(heat)])
        with ExitStack() as stack:
            contenders = start_all(heat.entries, stack, self._report.note)
            by_name = {contender.name: contender for contender in contenders}
            ours = [by_name[entry.name] for entry in heat.ours]
            result: dict[str, Any] = {"contenders": {contender.name: contender.facts for contender in contenders}}
            scenarios = self._options.scenarios
            if "quality" in scenarios:
                result["quality"] = {entry.name: self._quality(entry, by_name[entry.name]) for entry in heat.ours}
            warm_up(contenders, self._workloads, self._options.streams)
            if "step" in scenarios:
                result["step"] = {contender.name: self._step(contender) for contender in ours}
            if "ttft" in scenarios:
                result["ttft"] = self._ttft(heat, contenders)
            if "streams" in scenarios:
                result["streams"] = [self._streams(heat, contenders, number) for number in self._options.streams]
            if "shared_prefix" in scenarios:
                result["shared_prefix"] = {entry.name: self._shared_prefix(heat, entry, by_name) for entry in heat.ours}
        return result

    def _guests(self, heat: Heat) -> list[Entry]:
        """Peers of other heats that were fastest at some number of streams."""
        fastest = {entry.name: entry for streams, (_, entry) in self._fastest.items() if streams > 1}
        return [entry for name, entry in fastest.items() if name not in {peer.name for peer in heat.peers}]

    def _streams(self, heat: Heat, contenders: list[Contender], concurrency: int) -> dict[str, Any]:
        # A single stream gives one sample of TTFT per request; at 32 a round is long enough by itself.
        per_stream = 4 if concurrency == 1 else 2 if concurrency <= 8 else 1
        sizes = self._sizes
        rounds = [
            self._workloads.distinct(concurrency * per_stream, sizes.prompt, sizes.output)
            for _ in range(self._options.repeats)
        ]
        result = measure_streams(self._report, contenders, rounds, concurrency)
        self._hold(stream_bars(heat.entries, concurrency, result["ratios"]))
        rates = [(result["contenders"][peer.name]["output_tokens_per_s"], peer) for peer in heat.peers]
        known = [self._fastest[concurrency]] if concurrency in self._fastest else []
        if rates:
            self._fastest[concurrency] = max([*known, *rates], key=lambda item: item[0])
        return result

    def _ttft(self, heat: Heat, contenders: list[Contender]) -> dict[str, Any]:
        jobs = self._workloads.distinct(self._sizes.ttft_requests, self._sizes.ttft_prompt, _TTFT_OUTPUT)
        result = measure_ttft(self._report, contenders, jobs)
        self._hold(ttft_bars(heat.entries, result["ratios"]))
        return result

    def _shared_prefix(self, heat: Heat, entry: Entry, contenders: dict[str, Contender]) -> dict[str, Any]:
        sizes = self._sizes
        rounds = [
            self._workloads.shared_prefix(
                sizes.shared_requests, sizes.shared_prefix, sizes.shared_suffix, sizes.shared_output
            )
            for _ in range(self._options.repeats)
        ]
        sharing = [contenders[peer.name] for peer in heat.peers if peer.engine == "vllm"]
        result = measure_shared_prefix(self._report, contenders[entry.name], sharing, rounds)
        self._report.bar(f"{entry.name}: shared prefix, cache on / off", result["speedup"], _SHARED_SPEEDUP)
        self._hold(shared_prefix_bars(entry, result["ratios"]))
        return result

    def _zero_hit(self, entry: Entry) -> dict[str, Any]:
        """In a process of its own with little KV memory, so that the cache is full and evicts."""
        sizes = self._sizes
        longest = sizes.zero_hit_prompt.high + sizes.zero_hit_output.high
        rounds = [
            self._workloads.distinct(sizes.zero_hit_requests, sizes.zero_hit_prompt, sizes.zero_hit_output)
            for _ in range(sizes.zero_hit_pairs + 1)
        ]
        ours = entry.start(self._report.note, num_kv_blocks=1 + sizes.zero_hit_requests * -(-longest // 16))
        try:
            measure_zero_hit(self._report, ours, rounds[:1])
            result = measure_zero_hit(self._report, ours, rounds[1:])
        finally:
            ours.close()
        self._report.bar(
            f"{entry.name}: cost of the cache without hits", result["cost"], _ZERO_HIT_COST, at_least=False
        )
        return result

    def _score_reference(self, entries: Sequence[Entry]) -> dict[str, Any]:
        """By transformers, or by our own fp32 weights where that does not take part."""
        self._texts = windows(self._encode, self._sizes.quality)
        ours = next(entry for entry in entries if entry.is_ours)
        fp32 = replace(ours, precision="fp32", settings={**ours.settings, "precision": "fp32"}, gguf=None)
        reference = next((entry for entry in entries if entry.engine == "transformers"), fp32)
        contender = reference.start(self._report.note)
        try:
            self._reference = score(contender, self._texts)
        finally:
            contender.close()
        return {**text_facts(self._texts), "reference": reference.name, "perplexity": self._reference.perplexity}

    def _quality(self, entry: Entry, contender: Contender) -> dict[str, float]:
        assert self._reference is not None
        result = compare(score(contender, self._texts), self._reference)
        perplexity, agreement = result["perplexity"], result["argmax_agreement"]
        self._report.note(f"{entry.name}: perplexity {perplexity:.4f}, argmax agreement {agreement:.4f}")
        if entry.bits == 16:
            self._report.bar(f"{entry.name}: argmax agreement", agreement, _MIN_AGREEMENT)
            self._half_perplexity = self._half_perplexity or perplexity
        if entry.precision == "int8":
            standard = self._half_perplexity or self._reference.perplexity
            self._report.bar(
                f"{entry.name}: perplexity / 16-bit", perplexity / standard, _MAX_PERPLEXITY, at_least=False
            )
        return result

    def _step(self, contender: Contender) -> dict[str, float]:
        sizes = self._sizes
        prompts = [self._workloads.prompt(sizes.step_context) for _ in range(sizes.step_batch)]
        cost = measure_step(self._report, contender, prompts, sizes.steps)
        self._report.bar(
            f"{contender.name}: step outside the kernels", cost["overhead_share"], _MAX_OVERHEAD, at_least=False
        )
        return cost

    def _hold(self, verdicts: Iterable[Verdict]) -> None:
        for verdict in verdicts:
            self._report.bar(verdict.name, verdict.value, verdict.wanted, at_least=verdict.at_least)
