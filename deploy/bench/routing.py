"""``warmroot bench routing``: many shared prefixes on two replicas whose caches hold them only together.

With ``--traces`` it simulates instead: see ``routing_cells``.

Three systems get the same requests at the same times, each from a cold start: one replica with the memory of both,
two replicas with the warm-prefix policy, and two with round robin.
"""

import asyncio
from argparse import Namespace
from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from importlib import import_module
from statistics import median

from ...actors.models.source import resolve_model
from ...router.tokenizer import Tokenizer
from ..cli.flags import Parser
from .client import LoadClient, Served
from .cluster import DTYPES, MODEL_NAME, running_cluster
from .metrics import Summary, median_ratio, median_summary, summarize
from .peers.protocol import Job
from .report import Report
from .workload import LengthRange, Workloads

_MIN_CACHED_SHARE, _MAX_TTFT_SHARE = 0.9, 0.5
_SUFFIX, _OUTPUT = LengthRange(16, 48), LengthRange(16, 16)
_BLOCK_SIZE = 16
_RUNNING = 8
"""Requests at a time for which KV memory is added to that of the prefixes."""
_CALIBRATION_JOBS = 3


@dataclass(frozen=True, slots=True)
class System:
    """A cluster to measure."""

    name: str
    num_replicas: int
    routing_policy: str


WARM = System("2 replicas, warm_prefix", 2, "warm_prefix")
ROUND_ROBIN = System("2 replicas, round_robin", 2, "round_robin")
ONE = System("1 replica, all memory", 1, "warm_prefix")
SYSTEMS = (WARM, ROUND_ROBIN, ONE)


def main(argv: Sequence[str]) -> int:
    """Measure and report. Returns 1 if a bar does not hold (never with ``--quick``)."""
    if any(word.partition("=")[0] == "--traces" for word in argv):
        return import_module(".routing_cells", __package__).main(argv)
    options = _parse(argv)
    with Report("routing", vars(options), json_only=options.json) as report:
        bench = _RoutingBench(options, report)
        for number in range(options.repeats):
            bench.round(number)
        bench.summarize()
        status = report.finish()
    return 0 if options.quick else status


def _parse(argv: Sequence[str]) -> Namespace:
    parser = Parser(
        "warmroot bench routing", "Many shared prefixes on two replicas whose caches hold them only together."
    )
    add = parser.add_argument
    add("--traces", metavar="DIR", help="simulate traces instead; see --traces '' --help")
    add("model", nargs="?", default="smollm2", help="folder, GGUF file, hub id or smollm2")
    add("--dtype", choices=tuple(DTYPES), default="fp16", help="precision of the weights")
    add("--prefixes", type=int, default=16, help="shared prefixes")
    add("--per-prefix", type=int, default=16, help="requests on each; 1 in as many is cold for every policy")
    add("--prefix-tokens", type=int, default=640, help="mean length of a prefix; they differ by a fifth either way")
    add("--cache-share", type=float, default=0.65, help="share of all prefixes that one replica's memory holds")
    add("--rate", type=float, help="requests per second; default: from --load and a measurement")
    add("--load", type=float, default=2.0, help="replicas that would be busy if every prompt were computed whole")
    add("--repeats", type=int, default=1, help="rounds, each with new prefixes")
    add("--seed", type=int, default=0, help="of the workload")
    add("--quick", action="store_true", help="tiny workloads: shows that it runs, measures nothing")
    add("--json", action="store_true", help="only the JSON on stdout, the tables on stderr")
    options = parser.read(argv)
    if options.quick:
        options.prefixes, options.per_prefix, options.prefix_tokens, options.repeats = 4, 2, 64, 1
    return options


class _RoutingBench:
    """Rounds of the three systems."""

    def __init__(self, options: Namespace, report: Report) -> None:
        self._options = options
        self._report = report
        self._model = resolve_model(options.model)
        self._workloads = Workloads(Tokenizer.from_path(self._model).encode, options.seed)
        self._rate: float = options.rate or self._measured_rate()
        self._runs: dict[str, list[Summary]] = {system.name: [] for system in SYSTEMS}
        self._shares: dict[str, list[dict[str, int]]] = {system.name: [] for system in SYSTEMS}

    def round(self, number: int) -> None:
        """All systems on the same load; who begins rotates."""
        options, mean = self._options, self._options.prefix_tokens
        lengths = LengthRange(mean - mean // 5, mean + mean // 5)
        jobs = self._workloads.many_prefixes(options.prefixes, options.per_prefix, lengths, _SUFFIX, _OUTPUT)
        arrivals = self._workloads.arrivals(len(jobs), self._rate)
        first = number % len(SYSTEMS)
        for system in SYSTEMS[first:] + SYSTEMS[:first]:
            with self._running(system) as url:
                served = asyncio.run(_send(url, jobs, arrivals))
            summary = summarize(jobs, [answer.timing for answer in served], len(jobs))
            self._runs[system.name].append(summary)
            self._shares[system.name].append(dict(Counter(answer.replica for answer in served)))
            ttft = f"TTFT p90 {summary.ttft_p90_s * 1e3:.0f} ms"
            self._report.note(f"  {summary.cached_token_rate:.0%} cached, {ttft}")

    def summarize(self) -> None:
        """Tables, bars and results."""
        medians = {name: median_summary(runs) for name, runs in self._runs.items()}
        self._report.summaries(f"{self._options.prefixes} shared prefixes", medians)
        warm, round_robin, one = (self._runs[system.name] for system in (WARM, ROUND_ROBIN, ONE))
        cached = median_ratio([run.cached_token_rate for run in warm], [run.cached_token_rate for run in one])
        ttft = median_ratio([run.ttft_p90_s for run in warm], [run.ttft_p90_s for run in round_robin])
        self._report.bar("cached tokens, 2 replicas / 1 with all memory", cached, _MIN_CACHED_SHARE)
        self._report.bar("TTFT p90, warm_prefix / round_robin", ttft, _MAX_TTFT_SHARE, at_least=False)
        self._report.result["rate_per_s"] = self._rate
        self._report.result["kv_blocks"] = {system.name: self._num_blocks(system) for system in SYSTEMS}
        self._report.result["systems"] = {
            name: {**asdict(summary), "requests_by_replica": self._shares[name]} for name, summary in medians.items()
        }

    def _measured_rate(self) -> float:
        """Requests per second at which whole prompts would keep ``--load`` replicas busy."""
        length = LengthRange(self._options.prefix_tokens, self._options.prefix_tokens)
        jobs = self._workloads.distinct(_CALIBRATION_JOBS, length, LengthRange(1, 1))
        with self._running(WARM) as url:
            served = asyncio.run(_send_singly(url, jobs))
        cold_s = median(answer.timing.token_times[0] - answer.timing.start for answer in served)
        self._report.note(f"  a cold prompt of {length.low} tokens takes {cold_s:.2f} s")
        return self._options.load / cold_s

    def _running(self, system: System) -> AbstractContextManager[str]:
        self._report.note(f"starting {system.name}")
        return running_cluster(
            str(self._model),
            self._options.dtype,
            num_replicas=system.num_replicas,
            routing_policy=system.routing_policy,
            num_kv_blocks=self._num_blocks(system),
            max_model_len=1024,
            max_num_seqs=32,
        )

    def _num_blocks(self, system: System) -> int:
        """Per replica: its share of the prefixes and room for requests that run; one alone has the memory of both."""
        options = self._options
        prefixes = options.cache_share * options.prefixes * options.prefix_tokens / _BLOCK_SIZE
        running = _RUNNING * -(-(_SUFFIX.high + _OUTPUT.high) // _BLOCK_SIZE)
        return 1 + int(prefixes + running) * (2 // system.num_replicas)


async def _send(url: str, jobs: list[Job], arrivals: list[float]) -> list[Served]:
    client = LoadClient(url, MODEL_NAME)
    try:
        await client.closed_loop([Job([1] * _BLOCK_SIZE, 2)] * 4, 1)  # connections, imports, first steps
        return await client.open_loop(jobs, arrivals)
    finally:
        await client.close()


async def _send_singly(url: str, jobs: list[Job]) -> list[Served]:
    client = LoadClient(url, MODEL_NAME)
    try:
        return await client.closed_loop(jobs, 1)
    finally:
        await client.close()
