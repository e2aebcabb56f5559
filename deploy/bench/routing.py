"""``warmroot bench routing``: shared prefixes on replicas whose caches hold them only together.

With ``--traces`` it simulates instead: see ``routing_cells``.

All systems get the same requests at the same times, each from a cold start: replicas with the warm-prefix policy, the
same with other policies, and one replica with the memory of all.
"""

import asyncio
from argparse import Namespace
from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from statistics import median
from typing import Any

from ...actors.models.source import resolve_model
from ...router.policy import POLICIES
from ...router.tokenizer import Tokenizer
from ..cli.flags import Parser
from .client import LoadClient, Served
from .cluster import DTYPES, MODEL_NAME, running_cluster
from .metrics import Summary, median_ratio, median_summary, summarize
from .peers.protocol import Job
from .report import Report
from .router_redis import redis_server
from .routing_systems import BLOCK_SIZE, System, jobs_of, num_blocks, shared_tokens, systems_of
from .workload import LengthRange, Workloads

_MIN_CACHED_SHARE, _MAX_TTFT_SHARE = 0.9, 0.5
_CALIBRATION_JOBS = 3
_QUICK = {"prefixes": 2, "per_prefix": 4, "prefix_tokens": 64, "repeats": 1}


def main(argv: Sequence[str]) -> int:
    """Measure and report. Returns 1 if a bar does not hold (never with ``--quick``)."""
    if any(word.partition("=")[0] == "--traces" for word in argv):
        return import_module(".routing_cells", __package__).main(argv)
    options = _parse(argv)
    systems = systems_of(options)
    with Report("routing", vars(options), json_only=options.json) as report, redis_server() as redis:
        store: dict[str, Any] = {}
        if options.metadata_store == "redis":
            if redis is None:
                report.note("skipped: no redis-server on the path (Redis 7 or newer)")
                report.result["skipped"] = "no redis-server"
                return report.finish()
            host, port = redis.hosts[0]
            store = {"metadata_store": f"redis://{host}:{port}"}
        bench = _RoutingBench(options, systems, store, report)
        for number in range(options.repeats):
            bench.round(number)
        bench.summarize()
        status = report.finish()
    return 0 if options.quick else status


def _parse(argv: Sequence[str]) -> Namespace:
    parser = Parser("warmroot bench routing", "Shared prefixes on replicas whose caches hold them only together.")
    add = parser.add_argument
    add("--traces", metavar="DIR", help="simulate traces instead; see --traces '' --help")
    add("model", nargs="?", default="smollm2", help="folder, GGUF file, hub id or smollm2")
    add("--dtype", choices=tuple(DTYPES), default="fp16", help="precision of the weights")
    add("--replicas", type=int, default=2, help="replicas that share the load")
    add("--ingresses", type=int, default=1, help="ingresses, each with a router of its own")
    add("--metadata-store", choices=("embedded", "redis"), default="embedded", help="redis: one is started for it")
    add("--systems", default="round_robin,one", help="beside warm_prefix: policies; one: 1 replica, all memory")
    add("--workload", choices=("prefixes", "chat"), default="prefixes", help="chat: sessions on system prompts")
    add("--prefixes", type=int, default=16, help="shared prefixes")
    add("--per-prefix", type=int, default=16, help="requests on each; 1 in as many is cold for every policy")
    add("--prefix-tokens", type=int, default=640, help="mean length of a prefix; they differ by a fifth either way")
    add("--cache-share", type=float, default=0.65, help="share of all prefixes that one replica's memory holds")
    add("--rate", type=float, help="requests per second; default: from --load and a measurement")
    add("--load", type=float, default=2.0, help="replicas that would be busy if every prompt were computed whole")
    add("--repeats", type=int, default=1, help="rounds, each with new prefixes")
    add("--seed", type=int, default=0, help="of the workload")
    add("--record-traces", metavar="FOLDER", help="record each run, for warmroot simulate; one ingress")
    add("--quick", action="store_true", help="tiny workloads: shows that it runs, measures nothing")
    add("--json", action="store_true", help="only the JSON on stdout, the tables on stderr")
    options = parser.read(argv)
    if options.quick:
        vars(options).update(_QUICK)
    if options.record_traces is not None:
        Path(options.record_traces).mkdir(parents=True, exist_ok=True)
    return options


class _RoutingBench:
    """Rounds of all systems, the first of which is ours."""

    def __init__(self, options: Namespace, systems: list[System], store: dict[str, Any], report: Report) -> None:
        self._options, self._systems, self._store = options, systems, store
        self._report = report
        self._model = resolve_model(options.model)
        self._workloads = Workloads(Tokenizer.from_path(self._model).encode, options.seed)
        self._rate: float = options.rate or self._measured_rate()
        self._runs: dict[str, list[Summary]] = {system.name: [] for system in systems}
        self._shares: dict[str, list[dict[str, int]]] = {system.name: [] for system in systems}
        self._shared: list[float] = []

    def round(self, number: int) -> None:
        """All systems on the same load; who begins rotates."""
        jobs = jobs_of(self._workloads, self._options)
        arrivals = self._workloads.arrivals(len(jobs), self._rate)
        self._shared.append(shared_tokens(jobs))
        first = number % len(self._systems)
        for system in self._systems[first:] + self._systems[:first]:
            with self._running(system, **self._recording(system, number)) as url:
                served = asyncio.run(_send(url, jobs, arrivals))
            summary = summarize(jobs, [answer.timing for answer in served], len(jobs))
            self._runs[system.name].append(summary)
            self._shares[system.name].append(dict(Counter(answer.replica for answer in served)))
            ttft = f"TTFT mean {summary.ttft_mean_s * 1e3:.0f} ms, p90 {summary.ttft_p90_s * 1e3:.0f} ms"
            self._report.note(f"  {summary.cached_token_rate:.0%} cached, {ttft}")

    def summarize(self) -> None:
        """Tables, bars and results."""
        medians = {name: median_summary(runs) for name, runs in self._runs.items()}
        heads = ("", "cached", "TTFT mean ms", "p50", "p90", "p99", "output tok/s")
        self._report.table(
            f"{self._options.prefixes} shared prefixes, {self._options.workload}", heads, map(_row, medians.items())
        )
        self._bars()
        result, options = self._report.result, self._options
        result["rate_per_s"], result["shared_token_rate"] = self._rate, self._shared
        result["systems"] = {
            system.name: {
                **asdict(medians[system.name]),
                "policy": system.routing_policy,
                "ingresses": system.num_ingress,
                "kv_blocks": num_blocks(system, options),
                "requests_by_replica": self._shares[system.name],
                "rounds": [asdict(run) for run in self._runs[system.name]],
            }
            for system in self._systems
        }

    def _bars(self) -> None:
        """Ours against each of the others, as medians over rounds of the ratio."""
        ours, *others = self._systems
        ratios = {other.name: self._ratios(ours.name, other.name) for other in others}
        self._report.result["ratios"] = ratios
        bar = self._report.bar
        for other in others:
            ratio = ratios[other.name]
            if other.num_replicas == 1:
                bar(f"cached tokens over {other.name}", ratio["cached_token_rate"], _MIN_CACHED_SHARE)
                continue
            if other.routing_policy in POLICIES:  # rivals know of prefixes: they may hit more and be later all the same
                bar(f"cached tokens over {other.routing_policy}", ratio["cached_token_rate"], 1.0)
            bar(f"TTFT mean over {other.routing_policy}", ratio["ttft_mean_s"], 1.0, at_least=False)
            if other.routing_policy == "round_robin":
                bar("TTFT p90 over round_robin", ratio["ttft_p90_s"], _MAX_TTFT_SHARE, at_least=False)

    def _ratios(self, ours: str, other: str) -> dict[str, float]:
        fields = ("cached_token_rate", "ttft_mean_s", "ttft_p50_s", "ttft_p90_s", "ttft_p99_s")
        mine, theirs = self._runs[ours], self._runs[other]
        return {
            name: median_ratio([getattr(run, name) for run in mine], [getattr(run, name) for run in theirs])
            for name in fields
        }

    def _measured_rate(self) -> float:
        """Requests per second at which whole prompts would keep ``--load`` replicas busy."""
        length = LengthRange(self._options.prefix_tokens, self._options.prefix_tokens)
        jobs = self._workloads.distinct(_CALIBRATION_JOBS, length, LengthRange(1, 1))
        with self._running(self._systems[0]) as url:
            served = asyncio.run(_send_singly(url, jobs))
        cold_s = median(answer.timing.token_times[0] - answer.timing.start for answer in served)
        self._report.note(f"  a cold prompt of {length.low} tokens takes {cold_s:.2f} s")
        return self._options.load / cold_s

    def _recording(self, system: System, number: int) -> dict[str, str]:
        folder: str | None = self._options.record_traces
        name = f"{system.num_replicas}-{system.routing_policy}-{number}.jsonl"
        return {} if folder is None else {"record_trace": str(Path(folder).absolute() / name)}

    def _running(self, system: System, **keys: Any) -> AbstractContextManager[str]:
        self._report.note(f"starting {system.name}")
        return running_cluster(
            str(self._model),
            self._options.dtype,
            num_replicas=system.num_replicas,
            num_ingress=system.num_ingress,
            routing_policy=system.routing_policy,
            num_kv_blocks=num_blocks(system, self._options),
            max_model_len=1280,
            max_num_seqs=32,
            **self._store,
            **keys,
        )


def _row(run: tuple[str, Summary]) -> tuple[str, ...]:
    name, summary = run
    times = (summary.ttft_mean_s, summary.ttft_p50_s, summary.ttft_p90_s, summary.ttft_p99_s)
    milliseconds = (f"{value * 1e3:.0f}" for value in times)
    return (name, f"{summary.cached_token_rate:.1%}", *milliseconds, f"{summary.output_tokens_per_s:.1f}")


async def _send(url: str, jobs: list[Job], arrivals: list[float]) -> list[Served]:
    client = LoadClient(url, MODEL_NAME)
    try:
        await client.closed_loop([Job([1] * BLOCK_SIZE, 2)] * 4, 1)  # connections, imports, first steps
        return await client.open_loop(jobs, arrivals)
    finally:
        await client.close()


async def _send_singly(url: str, jobs: list[Job]) -> list[Served]:
    client = LoadClient(url, MODEL_NAME)
    try:
        return await client.closed_loop(jobs, 1)
    finally:
        await client.close()
