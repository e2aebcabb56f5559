"""What ``bench engine`` measures: streams, TTFT, a shared prefix, caching without hits, steps beside kernels."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from .contender import Contender, take_turns
from .metrics import Summary, median_ratio, median_summary, summarize
from .peers.protocol import Job
from .quality import QualitySizes
from .report import Report
from .workload import OUTPUT_TOKENS, PROMPT_TOKENS, LengthRange, Workloads, prefill_only

CACHED, UNCACHED = "cached", "uncached"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """How large the workloads are. Lengths in tokens."""

    prompt: LengthRange
    output: LengthRange
    ttft_prompt: LengthRange
    ttft_requests: int
    shared_requests: int
    shared_prefix: int
    shared_suffix: LengthRange
    shared_output: LengthRange
    zero_hit_requests: int
    zero_hit_prompt: LengthRange
    zero_hit_output: LengthRange
    zero_hit_pairs: int
    quality: QualitySizes
    step_batch: int
    step_context: int
    steps: int

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence."""
        ends = (
            self.prompt.high + self.output.high,
            self.shared_prefix + self.shared_suffix.high + self.shared_output.high,
            self.zero_hit_prompt.high + self.zero_hit_output.high,
            self.quality.window,
        )
        return max(ends)


FULL = Sizes(
    prompt=PROMPT_TOKENS,
    output=OUTPUT_TOKENS,
    ttft_prompt=LengthRange(128, 128),
    ttft_requests=20,
    shared_requests=32,
    shared_prefix=1024,
    shared_suffix=LengthRange(16, 64),
    shared_output=LengthRange(64, 64),
    zero_hit_requests=16,
    zero_hit_prompt=LengthRange(128, 256),
    zero_hit_output=LengthRange(32, 64),
    zero_hit_pairs=20,
    quality=QualitySizes(num_windows=8, window=512),
    step_batch=8,
    step_context=300,
    steps=64,
)
QUICK = Sizes(
    prompt=LengthRange(16, 32),
    output=LengthRange(4, 8),
    ttft_prompt=LengthRange(32, 32),
    ttft_requests=2,
    shared_requests=4,
    shared_prefix=128,
    shared_suffix=LengthRange(4, 8),
    shared_output=LengthRange(4, 4),
    zero_hit_requests=4,
    zero_hit_prompt=LengthRange(16, 32),
    zero_hit_output=LengthRange(4, 8),
    zero_hit_pairs=2,
    quality=QualitySizes(num_windows=1, window=64),
    step_batch=4,
    step_context=32,
    steps=4,
)


def warm_up(contenders: Sequence[Contender], workloads: Workloads, streams: Sequence[int]) -> None:
    """Each concurrency once, so that no measured round pays for what an engine does only once."""
    for concurrency in streams:
        jobs = workloads.distinct(concurrency, LengthRange(48, 64), LengthRange(3, 4))
        for contender in contenders:
            contender.run(jobs, concurrency)


def measure_streams(
    report: Report, contenders: Sequence[Contender], rounds: Sequence[list[Job]], concurrency: int
) -> dict[str, Any]:
    """Prefill alone, then prompts with their outputs, at one concurrency."""
    prefills = take_turns(contenders, [prefill_only(rounds[0])], concurrency)
    runs = take_turns(contenders, rounds, concurrency)
    title = f"{concurrency} streams, {len(rounds[0])} requests" if concurrency > 1 else "single stream"
    report.summaries(title, {name: median_summary(summaries) for name, summaries in runs.items()})
    return {
        "concurrency": concurrency,
        "requests": len(rounds[0]),
        "contenders": {
            name: {
                **asdict(median_summary(summaries)),
                "prefill_tokens_per_s": median(run.prompt_tokens_per_s for run in prefills[name]),
                "rounds_output_tokens_per_s": [run.output_tokens_per_s for run in summaries],
            }
            for name, summaries in runs.items()
        },
        "ratios": _ratios(
            {
                "output": (runs, "output_tokens_per_s"),
                "decode": (runs, "decode_tokens_per_s"),
                "prefill": (prefills, "prompt_tokens_per_s"),
                "ttft": (runs, "ttft_p50_s"),
            }
        ),
    }


def measure_ttft(report: Report, contenders: Sequence[Contender], jobs: Sequence[Job]) -> dict[str, Any]:
    """Single requests, one at a time: contenders take turns with each."""
    runs = take_turns(contenders, [[job] for job in jobs], 1)
    medians = {name: median(run.ttft_p50_s for run in summaries) for name, summaries in runs.items()}
    rows = [(name, f"{seconds * 1e3:.1f}") for name, seconds in medians.items()]
    report.table(f"prompts of {len(jobs[0].prompt)} tokens, one at a time", ("", "TTFT p50 ms"), rows)
    return {"requests": len(jobs), "ttft_p50_s": medians, "ratios": _ratios({"ttft": (runs, "ttft_p50_s")})}


def measure_step(report: Report, ours: Contender, prompts: list[list[int]], num_steps: int) -> dict[str, float]:
    """What the engine adds to the kernels while these prompts decode."""
    cost: dict[str, float] = ours.call("step_cost", prompts=prompts, num_steps=num_steps)
    whole, kernels, share = cost["step_s"] * 1e3, cost["kernels_s"] * 1e3, cost["overhead_share"]
    report.note(
        f"{ours.name}: a step of {len(prompts)} takes {whole:.2f} ms, {kernels:.2f} of it kernels: {share:.1%} is not"
    )
    return cost


def _ratios(figures: Mapping[str, tuple[dict[str, list[Summary]], str]]) -> dict[str, dict[str, dict[str, float]]]:
    """[contender][other][figure], from ``figures``: (runs by contender, field).

    Medians of the ratios round by round; above 1 the first is faster, or, for TTFT, slower.
    """

    def ratio(name: str, other: str, runs: dict[str, list[Summary]], field: str) -> float:
        return median_ratio(*([getattr(run, field) for run in runs[key]] for key in (name, other)))

    names = list(next(iter(figures.values()))[0])
    return {
        name: {
            other: {figure: ratio(name, other, *source) for figure, source in figures.items()}
            for other in names
            if other != name
        }
        for name in names
    }


def measure_shared_prefix(
    report: Report, ours: Contender, sharing_peers: Sequence[Contender], rounds: Sequence[list[Job]]
) -> dict[str, Any]:
    """All requests at once on one long prefix: our cache on and off, beside peers that have a prefix cache."""
    runs: dict[str, list[Summary]] = {}
    for number, jobs in enumerate(rounds):
        for variant in _alternate(number):
            name = f"{ours.name} {variant}"
            runs.setdefault(name, []).append(ours.measure(jobs, len(jobs), variant=variant))
        for peer in sharing_peers:
            runs.setdefault(peer.name, []).append(peer.measure(jobs, len(jobs)))
    medians = {name: median_summary(summaries) for name, summaries in runs.items()}
    report.summaries(f"{len(rounds[0])} requests that share a prefix", medians)
    on, off = (runs[f"{ours.name} {variant}"] for variant in (CACHED, UNCACHED))
    rate = "output_tokens_per_s"
    return {
        "requests": len(rounds[0]),
        "contenders": medians,
        "speedup": median_ratio([run.wall_s for run in off], [run.wall_s for run in on]),
        "ratios": {
            peer.name: median_ratio([getattr(run, rate) for run in on], [getattr(run, rate) for run in runs[peer.name]])
            for peer in sharing_peers
        },
    }


def measure_zero_hit(report: Report, ours: Contender, rounds: Sequence[list[Job]]) -> dict[str, Any]:
    """What the prefix cache costs when it never helps, in wall and CPU time.

    The cache is not emptied between rounds: once it is full, every new block evicts an old one.
    """
    walls: dict[str, list[float]] = {CACHED: [], UNCACHED: []}
    cpus: dict[str, list[float]] = {CACHED: [], UNCACHED: []}
    hits = 0.0
    for number, jobs in enumerate(rounds):
        for variant in _alternate(number):
            timings, cpu = ours.run(jobs, len(jobs), reset=False, variant=variant)
            summary = summarize(jobs, timings, len(jobs))
            walls[variant].append(summary.wall_s)
            cpus[variant].append(cpu)
            hits += summary.cached_token_rate
    cost = median_ratio(walls[CACHED], walls[UNCACHED]) - 1
    cpu_cost = median_ratio(cpus[CACHED], cpus[UNCACHED]) - 1
    report.note(f"prefix cache without hits: {cost:+.2%} time, {cpu_cost:+.2%} CPU ({len(rounds)} pairs)")
    return {"pairs": len(rounds), "cost": cost, "cpu_cost": cpu_cost, "hits": hits, "wall_s": walls, "cpu_s": cpus}


def _alternate(number: int) -> tuple[str, str]:
    """Who goes first changes every round, so that drift cancels out."""
    return (CACHED, UNCACHED) if number % 2 == 0 else (UNCACHED, CACHED)
