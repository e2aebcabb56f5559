"""``warmroot simulate``: a trace on simulated replicas, through the production router."""

from argparse import ArgumentTypeError, Namespace
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from time import perf_counter

from ...cluster.errors import ConfigError
from ..bench.report import Report
from ..simulate.cluster import simulate
from ..simulate.costs import ReplicaCosts
from ..simulate.results import Results
from ..simulate.scenario import POLICY_NAMES, load_trace, scaled, setup_of
from ..simulate.trace import ideal_hit_rate
from .flags import Parser


def main(argv: Sequence[str]) -> int:
    """Simulate and report."""
    options = _parser().read(argv)
    if options.plot and find_spec("matplotlib") is None:
        raise ConfigError("--plot: matplotlib is missing: pip install 'warmroot[bench]'", param="plot")
    costs = ReplicaCosts.read(options.costs) if options.costs else ReplicaCosts()
    if options.kv_tokens:
        costs = costs.with_memory(options.kv_tokens)
    trace = scaled(
        load_trace(options.trace, options.requests, options.seed),
        options.replicas,
        options.load,
        costs,
        options.copies,
    )
    parameters = {name: str(value) if isinstance(value, Path) else value for name, value in vars(options).items()}
    with Report("simulate", parameters, json_only=options.json) as report:
        rate = len(trace.requests) / max(trace.span_s, 1e-9)
        report.note(
            f"{len(trace.requests)} requests at {rate:.2f}/s; one endless cache hits {ideal_hit_rate(trace):.1%}"
        )
        runs: dict[str, Results] = {}
        for policy in options.policy:
            began = perf_counter()
            setup = setup_of(
                policy,
                options.replicas,
                trace,
                options.late_binding_backlog,
                costs=costs,
                num_routers=options.routers,
                event_lag_s=options.event_lag_ms / 1e3,
                kill_at=options.kill_replica_at,
                bus_down=options.redis_down,
                slow_share=options.slow_share,
                seed=options.seed,
            )
            runs[policy] = simulate(trace, setup)
            report.note(f"{policy}: simulated in {perf_counter() - began:.1f} s")
        _report(report, options, runs)
        return report.finish()


def _report(report: Report, options: Namespace, runs: dict[str, Results]) -> None:
    summaries = {name: results.summary() for name, results in runs.items()}
    milliseconds = ("ttft_mean_s", "ttft_p50_s", "ttft_p90_s", "ttft_p99_s", "e2e_mean_s", "e2e_p90_s", "tpot_mean_s")
    rows = [
        (name, f"{s['hit_rate']:.3f}", *(f"{s[column] * 1e3:.0f}" for column in milliseconds), f"{s['imbalance']:.2f}")
        for name, s in summaries.items()
    ]
    heads = ("", "hit", "TTFT ms", "p50", "p90", "p99", "E2E ms", "p90", "TPOT", "max/mean")
    report.table(f"{options.trace}, {options.replicas} replicas", heads, rows)
    report.result["policies"] = summaries
    if options.plot:
        from ..simulate.plot import draw

        draw(runs, f"{options.trace}, {options.replicas} replicas", options.plot)
        report.note(f"drawn: {options.plot} and {options.plot.with_suffix('.html')}")


def _parser() -> Parser:
    parser = Parser("warmroot simulate", "Replay a trace on simulated replicas through the production router.")
    add = parser.add_argument
    add("--trace", default="chat", help="Mooncake JSONL, Azure CSV, a recording, or chat or agent (made up)")
    add("--replicas", type=_positive, default=4, metavar="N", help="simulated replicas")
    add("--policy", type=_policies, default=("warm_prefix",), help=f"one or more of {', '.join(POLICY_NAMES)}, or all")
    add("--load", type=float, help="share of the replicas' prefill speed, uncached; default: as recorded")
    add("--requests", type=_positive, help="of the trace, from its beginning; default: all, or 4000")
    add("--copies", type=_positive, help="copies of the trace at once; default: one for every 4 replicas")
    add("--routers", type=_positive, default=1, metavar="K", help="routers that share the requests")
    add("--event-lag-ms", type=float, default=20.0, help="from a step's end to the routers' indexes")
    add("--late-binding-backlog", type=float, default=0.4, help="see warmroot serve")
    add("--kill-replica-at", type=float, metavar="SECONDS", help="a replica dies then, and is back 30 s later")
    add("--redis-down", type=_span, metavar="A:B", help="no event arrives between these seconds")
    add("--slow-share", type=float, default=0.0, help="share of replicas that take twice the time")
    add("--costs", type=Path, help="JSON of warmroot calibrate; default: Dynamo's mocker, which is like vLLM on a GPU")
    add("--kv-tokens", type=_positive, help="KV memory of a replica, instead of what --costs says")
    add("--seed", type=int, default=0, help="of draws and generators")
    add("--plot", type=Path, help="PNG file to draw; an HTML page goes beside it")
    add("--json", action="store_true", help="only the JSON on stdout, the table on stderr")
    return parser


def _policies(text: str) -> tuple[str, ...]:
    names = POLICY_NAMES if text == "all" else tuple(text.split(","))
    for name in names:
        if name not in POLICY_NAMES:
            raise ArgumentTypeError(f"{name!r} is not one of {', '.join(POLICY_NAMES)}")
    return names


def _span(text: str) -> tuple[float, float]:
    begin, _, end = text.partition(":")
    try:
        span = float(begin), float(end)
    except ValueError:
        raise ArgumentTypeError(f"{text!r} is not of the form BEGIN:END") from None
    if not 0 <= span[0] < span[1]:
        raise ArgumentTypeError(f"{text!r} does not end after it begins")
    return span


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise ArgumentTypeError(f"should be greater than or equal to 1, not {text}")
    return number
