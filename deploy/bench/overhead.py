"""``warmroot bench overhead``: HTTP, ingress, router and channel against the same engine stepped in process."""

import asyncio
import os
import time
from argparse import Namespace
from collections.abc import Sequence
from contextlib import ExitStack
from statistics import median

from ...actors.models.source import resolve_model
from ...router.tokenizer import Tokenizer
from ..cli.flags import Parser
from .client import LoadClient
from .cluster import DTYPES, MODEL_NAME, running_cluster
from .contender import Contender
from .metrics import Summary, median_ratio, median_summary, summarize
from .peers.protocol import Job
from .processes import cpu_seconds_by_role
from .report import Report
from .workload import OUTPUT_TOKENS, PROMPT_TOKENS, LengthRange, Workloads

_MIN_THROUGHPUT, _MAX_ADDED_TTFT_MS = 0.9, 10.0
_TTFT_PROMPT, _TTFT_OUTPUT = LengthRange(128, 128), LengthRange(4, 4)
_NUM_BLOCKS = 2561
IN_PROCESS, SERVED = "in process", "over HTTP"


def main(argv: Sequence[str]) -> int:
    """Measure and report. Returns 1 if a bar does not hold (never with ``--quick``)."""
    options = _parse(argv)
    with Report("overhead", vars(options), json_only=options.json) as report:
        _compare(options, report)
        status = report.finish()
    return 0 if options.quick else status


def _compare(options: Namespace, report: Report) -> None:
    limits = {"max_model_len": 1024, "max_num_seqs": max(32, options.streams), "num_kv_blocks": _NUM_BLOCKS}
    model = resolve_model(options.model)
    with ExitStack() as stack:
        report.note("starting the engine in process")
        settings = {**limits, "model": str(model), "precision": options.dtype, "threads": options.threads}
        engine = Contender(IN_PROCESS, "warmroot_peer", settings)
        stack.callback(engine.close)
        report.note("starting the cluster")
        url = stack.enter_context(
            running_cluster(str(model), options.dtype, num_replicas=1, threads_per_replica=options.threads, **limits)
        )
        report.result["engine"] = engine.facts
        workloads = Workloads(Tokenizer.from_path(model).encode, options.seed)
        asyncio.run(_measure(options, report, workloads, engine, url))


def _parse(argv: Sequence[str]) -> Namespace:
    parser = Parser(
        "warmroot bench overhead", "HTTP, ingress, router and channel against the same engine stepped in process."
    )
    add = parser.add_argument
    add("model", nargs="?", default="smollm2", help="folder, GGUF file, hub id or smollm2")
    add("--dtype", choices=tuple(DTYPES), default="fp16", help="precision of the weights")
    add("--threads", type=int, default=os.cpu_count(), help="of the engine, served or not; default: all cores")
    add("--streams", type=int, default=32, help="concurrency at which throughput is compared")
    add("--repeats", type=int, default=5, help="rounds at that concurrency")
    add("--singles", type=int, default=30, help="single requests by which TTFT is compared")
    add("--seed", type=int, default=0, help="of the workload")
    add("--quick", action="store_true", help="tiny workloads: shows that it runs, measures nothing")
    add("--json", action="store_true", help="only the JSON on stdout, the tables on stderr")
    options = parser.read(argv)
    if options.quick:
        options.repeats, options.singles, options.streams = 1, 3, 4
    return options


async def _measure(options: Namespace, report: Report, workloads: Workloads, engine: Contender, url: str) -> None:
    duel = _Duel(engine, LoadClient(url, MODEL_NAME))
    try:
        for concurrency in (1, options.streams):
            await duel.round(workloads.distinct(concurrency, LengthRange(48, 64), LengthRange(4, 4)), concurrency)
        await _throughput(options, report, workloads, duel)
        await _first_token(options, report, workloads, duel)
    finally:
        await duel.client.close()


async def _throughput(options: Namespace, report: Report, workloads: Workloads, duel: "_Duel") -> None:
    lengths = (LengthRange(16, 32), LengthRange(4, 8)) if options.quick else (PROMPT_TOKENS, OUTPUT_TOKENS)
    duel.begin()
    for _ in range(options.repeats):
        await duel.round(workloads.distinct(options.streams, *lengths), options.streams)
    medians = {name: median_summary(runs) for name, runs in duel.runs.items()}
    report.summaries(f"{options.streams} streams", medians)
    rates = {name: [run.output_tokens_per_s for run in runs] for name, runs in duel.runs.items()}
    ratio = median_ratio(rates[SERVED], rates[IN_PROCESS])
    cpu = duel.cpu_us_per_token()
    report.table("CPU per output token", ("", "µs"), [(role, f"{used:.0f}") for role, used in sorted(cpu.items())])
    report.bar(f"throughput at {options.streams} streams, {SERVED} / {IN_PROCESS}", ratio, _MIN_THROUGHPUT)
    report.result["throughput"] = {
        "contenders": medians,
        "rounds_output_tokens_per_s": rates,
        "ratio": ratio,
        "cpu_us_per_output_token": cpu,
    }


async def _first_token(options: Namespace, report: Report, workloads: Workloads, duel: "_Duel") -> None:
    duel.begin()
    for _ in range(options.singles):
        await duel.round(workloads.distinct(1, _TTFT_PROMPT, _TTFT_OUTPUT), 1)
    medians = {name: median_summary(runs) for name, runs in duel.runs.items()}
    report.summaries(f"single requests of {_TTFT_PROMPT.low} tokens", medians)
    pairs = zip(duel.runs[SERVED], duel.runs[IN_PROCESS], strict=True)
    added_ms = 1e3 * median(served.ttft_p50_s - alone.ttft_p50_s for served, alone in pairs)
    report.bar("TTFT added at one stream, ms", added_ms, _MAX_ADDED_TTFT_MS, at_least=False)
    report.result["first_token"] = {"contenders": medians, "added_ttft_ms": added_ms}


class _Duel:
    """The engine alone and the cluster, turn by turn on the same jobs, and the CPU time that serving took."""

    def __init__(self, engine: Contender, client: LoadClient) -> None:
        self.client = client
        self.runs: dict[str, list[Summary]] = {}
        self._engine = engine
        self.begin()

    def begin(self) -> None:
        """Forget earlier rounds."""
        self.runs = {IN_PROCESS: [], SERVED: []}
        self._cpu_s: dict[str, float] = {}
        self._tokens = 0

    async def round(self, jobs: list[Job], concurrency: int) -> None:
        """Both, the order changing from round to round."""
        turns = [self._alone, self._served]
        for turn in turns if len(self.runs[SERVED]) % 2 == 0 else reversed(turns):
            await turn(jobs, concurrency)

    def cpu_us_per_token(self) -> dict[str, float]:
        """Microseconds per output token over HTTP, by the part a process plays."""
        return {role: 1e6 * seconds / self._tokens for role, seconds in self._cpu_s.items()}

    async def _alone(self, jobs: list[Job], concurrency: int) -> None:
        # Blocks the loop on purpose: nothing else is to run meanwhile.
        self.runs[IN_PROCESS].append(self._engine.measure(jobs, concurrency, reset=False))

    async def _served(self, jobs: list[Job], concurrency: int) -> None:
        before = self._cpu_now()
        served = await self.client.closed_loop(jobs, concurrency)
        after = self._cpu_now()
        for role in after:
            used = after[role] - before.get(role, 0.0)
            self._cpu_s[role] = self._cpu_s.get(role, 0.0) + used
        self._tokens += sum(job.max_tokens for job in jobs)
        self.runs[SERVED].append(summarize(jobs, [answer.timing for answer in served], concurrency))

    def _cpu_now(self) -> dict[str, float]:
        # The idle engine in process belongs to no role of a cluster.
        roles = cpu_seconds_by_role(os.getpid(), leave_out=self._engine.pid)
        return {**roles, "load client": time.process_time()}
