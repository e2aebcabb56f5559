"""``warmroot bench routing --traces``: every policy on every trace, size and load, simulated."""

from argparse import Namespace
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from statistics import geometric_mean, median
from typing import Any

from ..cli.flags import Parser
from ..simulate.cluster import simulate
from ..simulate.costs import ReplicaCosts
from ..simulate.generators import GENERATORS
from ..simulate.scenario import EAGER, POLICY_NAMES, load_trace, scaled, setup_of
from ..simulate.trace import Trace
from . import routing_tune
from .report import Report
from .routing_referee import Verdict, judge, tell

OURS = "warm_prefix"
DEFAULTS = (
    "round_robin",
    "power_of_two",
    "least_loaded",
    "sglang",
    "ray",
    "dynamo",
    "llmd_precise",
    "preble",
    "aibrix",
)
"""Rivals as their projects ship them."""
TUNED = ("ray10", "dynamo10", "dynamo_wspt", "llmd_base", "llmd_active")
"""Rivals with the best settings found for them, and other profiles of theirs."""
_MEDIANS = {"dynamo": 0.76, "llmd_precise": 0.92, "sglang": 0.78, "ray": 0.84}
"""Mean TTFT of ours over theirs: median over the cells with 16 replicas below saturation."""
_MOST_LOAD = 0.65
_MOST_WORSE = 1.03
_OVERLOAD, _OVERLOADED = 0.8, 0.55
_QUICK = {"replicas": (4,), "loads": (0.5,), "requests": 200, "policies": (OURS, "round_robin", "dynamo")}


@dataclass(frozen=True, slots=True)
class Cell:
    """One simulation."""

    trace: str
    replicas: int
    load: float
    policy: str
    seed: int


def main(argv: Sequence[str]) -> int:
    """Simulate all cells and hold them against the bars. Returns 1 if one does not hold (never with ``--quick``)."""
    options = _parse(argv)
    with Report("routing", vars(options), json_only=options.json) as report:
        if options.referee:
            return _referee(report, options)
        if options.tune:
            options.policies = routing_tune.names()
        rows: list[dict[str, Any]] = []
        for row in _simulated(options):
            rows.append(row)
            report.note(
                f"  {row['trace']} N={row['replicas']} load {row['load']}: {row['policy']} hit {row['hit_rate']:.3f},"
                f" TTFT {row['ttft_mean_s'] * 1e3:.0f} ms, p90 {row['ttft_p90_s'] * 1e3:.0f} ms"
            )
        report.result["cells"] = rows
        if options.tune:
            routing_tune.tell(report, rows, _MOST_LOAD)
        else:
            _tables(report, rows)
            _bars(report, rows)
        status = report.finish()
    return 0 if options.quick else status


def _parse(argv: Sequence[str]) -> Namespace:
    parser = Parser("warmroot bench routing --traces", "Every policy on every trace, size and load, simulated.")
    add = parser.add_argument
    add("--traces", default="", metavar="DIR", help="folder of traces; default: the built-in generators")
    add("--replicas", type=_ints, default=(4, 16, 64), help="numbers of replicas")
    add("--loads", type=_floats, default=(0.3, 0.5, 0.65, 0.8), help="shares of the replicas' uncached prefill speed")
    add("--policies", type=_names, default=(OURS, EAGER, *DEFAULTS, *TUNED), help="names, or all")
    add("--requests", type=int, default=1500, help="of each trace; N replicas get N / 4 copies at once")
    add("--last", action="store_true", help="the last requests of each trace, not the first: others than were tuned on")
    add("--referee", action="store_true", help="instead: our dynamo policies beside Dynamo's own offline replay")
    add("--tune", action="store_true", help="instead: every rival at several settings of its own")
    add("--processes", type=int, default=2, help="simulations at a time")
    add("--seed", type=int, default=0, help="of generators and draws")
    add("--quick", action="store_true", help="a few small cells: shows that it runs, measures nothing")
    add("--json", action="store_true", help="only the JSON on stdout, the tables on stderr")
    options = parser.read(argv)
    if options.quick:
        vars(options).update(_QUICK)
    return options


def _referee(report: Report, options: Namespace) -> int:
    verdicts: list[Verdict] = []
    for source in _sources(options.traces):
        for replicas in options.replicas:
            for load in options.loads:
                trace = _trace(source, options.requests, options.last, options.seed)
                report.note(f"  {Path(source).stem} N={replicas} load {load}")
                scaled_up = scaled(trace, replicas, load, ReplicaCosts())
                verdicts += judge(scaled_up, Path(source).stem, replicas, load, options.seed)
    tell(report, verdicts)
    status = report.finish()
    return 0 if options.quick else status


def _simulated(options: Namespace) -> Iterator[dict[str, Any]]:
    cells = [
        Cell(trace, replicas, load, policy, options.seed)
        for trace in _sources(options.traces)
        for replicas in options.replicas
        for load in options.loads
        for policy in options.policies
    ]
    work = [(cell, options.requests, options.last) for cell in cells]
    if options.processes == 1:
        yield from map(_simulate, work)
        return
    with get_context("spawn").Pool(options.processes) as pool:
        yield from pool.imap(_simulate, work)


def _simulate(work: tuple[Cell, int, bool]) -> dict[str, Any]:
    cell, requests, last = work
    trace = scaled(_trace(cell.trace, requests, last, cell.seed), cell.replicas, cell.load, ReplicaCosts())
    named = cell.policy in POLICY_NAMES
    setup = (setup_of if named else routing_tune.setup)(cell.policy, cell.replicas, trace, seed=cell.seed)
    summary = simulate(trace, setup).summary()
    return {
        "trace": Path(cell.trace).stem,
        "replicas": cell.replicas,
        "load": cell.load,
        "policy": cell.policy,
        **summary,
    }


@cache
def _trace(source: str, requests: int, last: bool, seed: int) -> Trace:
    if source in GENERATORS:
        return load_trace(source, requests, seed)
    trace = load_trace(source, None, seed)
    return trace.tail(requests) if last else trace.head(requests)


def _sources(folder: str) -> list[str]:
    if not folder:
        return list(GENERATORS)
    return sorted(str(path) for path in Path(folder).glob("*.jsonl"))


def _tables(report: Report, rows: list[dict[str, Any]]) -> None:
    """Policies relative to Dynamo's defaults: geometric means over traces, for each size and load."""
    for replicas, load in sorted({(row["replicas"], row["load"]) for row in rows}):
        some = [row for row in rows if (row["replicas"], row["load"]) == (replicas, load)]
        base = {row["trace"]: row for row in some if row["policy"] == "dynamo"}
        if not base:
            continue
        lines: list[tuple[str, ...]] = []
        for policy in dict.fromkeys(row["policy"] for row in some):
            mine = [row for row in some if row["policy"] == policy]
            columns = ("ttft_mean_s", "ttft_p50_s", "ttft_p90_s", "ttft_p99_s", "e2e_mean_s")
            ratios = [geometric_mean(row[column] / base[row["trace"]][column] for row in mine) for column in columns]
            hit = sum(row["hit_rate"] for row in mine) / len(mine)
            lines.append((policy, f"{hit:.3f}", *(f"{ratio:.2f}" for ratio in ratios)))
        heads = ("relative to dynamo", "hit", "TTFT mean", "p50", "p90", "p99", "E2E mean")
        report.table(f"{replicas} replicas, load {load}", heads, lines)


def _bars(report: Report, rows: list[dict[str, Any]]) -> None:
    cells = {(row["trace"], row["replicas"], row["load"], row["policy"]): row for row in rows}
    names = {row["policy"] for row in rows}
    if OURS not in names:
        return
    below = [row for row in rows if row["policy"] in DEFAULTS and row["load"] <= _MOST_LOAD]
    for column, title in (("ttft_mean_s", "mean"), ("ttft_p90_s", "p90")):
        worst = max(below, key=lambda row: _ratio(cells, row, column), default=None)
        if worst is not None:
            place = f"{worst['trace']} N={worst['replicas']} {worst['load']}, {worst['policy']}"
            name = f"worst cell <= {_MOST_LOAD}, TTFT {title}: {place}"
            report.bar(name, _ratio(cells, worst, column), _MOST_WORSE, at_least=False)
    for rival, wanted in _MEDIANS.items():
        ratios = [_ratio(cells, row, "ttft_mean_s") for row in below if (row["policy"], row["replicas"]) == (rival, 16)]
        if ratios:
            report.bar(f"median TTFT mean, N=16, over {rival}", median(ratios), wanted, at_least=False)
    loaded = [row for row in rows if (row["policy"], row["load"]) == ("dynamo", _OVERLOAD)]
    if loaded:
        ratio = geometric_mean(_ratio(cells, row, "ttft_mean_s") for row in loaded)
        report.bar(f"TTFT mean at load {_OVERLOAD} over dynamo", ratio, _OVERLOADED, at_least=False)


def _ratio(cells: dict[tuple[str, int, float, str], dict[str, Any]], row: dict[str, Any], column: str) -> float:
    return cells[row["trace"], row["replicas"], row["load"], OURS][column] / row[column]


def _ints(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(",")))


def _floats(text: str) -> tuple[float, ...]:
    return tuple(map(float, text.split(",")))


def _names(text: str) -> Iterable[str]:
    return POLICY_NAMES if text == "all" else tuple(text.split(","))
