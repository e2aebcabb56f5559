"""``warmroot bench autoscaling``: simulated days under our policy, Ray Serve's, and fixed numbers of replicas."""

from argparse import ArgumentTypeError, Namespace
from collections.abc import Callable, Iterator, Sequence
from time import perf_counter
from typing import NamedTuple

from ray.serve.config import AutoscalingConfig as ServeAutoscaling

from ...cluster.autoscaling_config import AutoscalingConfig
from ..cli.flags import Parser
from ..simulate.day import day
from ..simulate.elastic import Elasticity, Scaler
from ..simulate.scaled_day import SLO, Outcomes, live
from ..simulate.scalers import Fixed, OngoingRequests, PredictedWork
from .report import Report

OURS = "predicted work"
_QUICK_S = (15.0, 240.0)
"""Delays of Serve's policy, up and down, that it is given beside its own."""
_HEADS = ("", "in time", "TTFT", "tokens", "replica-hours", "most", "changes", "TTFT p50 s", "p99", "hit")


class _Contender(NamedTuple):
    name: str
    make: Callable[[], Scaler]
    first: int
    """Replicas that it begins with."""


def main(argv: Sequence[str]) -> int:
    """Simulate and report."""
    options = _parse(argv)
    with Report("autoscaling", vars(options), json_only=options.json) as report:
        traces = [day(options.sessions, seed, hours=options.hours, begin=options.begin) for seed in options.seeds]
        report.note(f"{sum(len(trace.requests) for trace in traces)} requests in {len(traces)} days")
        report.result["policies"] = summaries = dict[str, dict[str, float]]()
        report.result["changes"] = changes = dict[str, list[list[tuple[float, int]]]]()
        for name, make, first in _contenders(options):
            began = perf_counter()
            elasticity = Elasticity(start_s=options.start_seconds)
            lived = [live(trace, make(), begin_with=first, elasticity=elasticity) for trace in traces]
            summaries[name] = _total([outcomes for outcomes, _ in lived]).summary(SLO)
            changes[name] = [when for _, when in lived]
            report.note(f"{name}: simulated in {perf_counter() - began:.0f} s")
        title = f"TTFT within {SLO.ttft_s:g} s and tokens {SLO.itl_s * 1e3:.0f} ms apart"
        report.table(title, _HEADS, [_row(*named) for named in summaries.items()])
        return report.finish()


def _contenders(options: Namespace) -> Iterator[_Contender]:
    least, most = options.min_replicas, options.max_replicas
    keys = {"min_replicas": least, "max_replicas": most, "ttft_slo": SLO.ttft_s, "itl_slo": SLO.itl_s}
    config = AutoscalingConfig.model_validate(keys)
    yield _Contender(OURS, lambda: PredictedWork(config), max(1, least))
    for target in options.ongoing:
        for up_s, down_s in ((30.0, 600.0), _QUICK_S):
            serve = ServeAutoscaling(
                min_replicas=least,
                max_replicas=most,
                target_ongoing_requests=target,
                upscale_delay_s=up_s,
                downscale_delay_s=down_s,
            )
            name = f"{target:g} ongoing, {up_s:g} / {down_s:g} s"
            yield _Contender(name, lambda serve=serve: OngoingRequests(serve), max(1, least))
    for number in options.fixed:
        yield _Contender(f"always {number}", lambda number=number: Fixed(number), number)


def _total(days: Sequence[Outcomes]) -> Outcomes:
    total = days[0]
    for outcomes in days[1:]:
        total += outcomes
    return total


def _row(name: str, summary: dict[str, float]) -> tuple[str, ...]:
    shares = (f"{summary[key]:.1%}" for key in ("attainment", "ttft_in_time", "itl_in_time"))
    counts = (f"{summary['replica_hours']:.1f}", f"{summary['most_replicas']:.0f}", f"{summary['changes']:.0f}")
    times = (f"{summary['ttft_p50_s']:.2f}", f"{summary['ttft_p99_s']:.1f}", f"{summary['hit_rate']:.3f}")
    return name, *shares, *counts, *times


def _parse(argv: Sequence[str]) -> Namespace:
    parser = Parser("warmroot bench autoscaling", "Simulated days whose replicas come and go.")
    add = parser.add_argument
    add("--seeds", type=_several(int), default=(11,), metavar="N,...", help="one day for each")
    add("--sessions", type=int, default=30_000, help="of a whole day")
    add("--hours", type=float, default=24.0, help="of the day that are simulated")
    add("--begin", type=float, default=0.0, metavar="HOUR", help="the first of these")
    add("--start-seconds", type=float, default=90.0, help="from the decision until a replica's weights are loaded")
    add("--min-replicas", type=int, default=1, help="at least")
    add("--max-replicas", type=int, default=24, help="at most")
    add(
        "--ongoing", type=_several(float), default=(2.0, 8.0, 16.0), metavar="N,...", help="Serve's targets per replica"
    )
    add("--fixed", type=_several(int), default=(4, 6, 8), metavar="N,...", help="fixed numbers of replicas")
    add("--json", action="store_true", help="only the JSON on stdout, the table on stderr")
    return parser.read(argv)


def _several(kind: Callable[[str], float]) -> Callable[[str], tuple[float, ...]]:
    def numbers(text: str) -> tuple[float, ...]:
        try:
            return tuple(kind(part) for part in text.split(","))
        except ValueError:
            raise ArgumentTypeError(f"{text!r} is not a list of numbers, such as 4,8") from None

    return numbers
