"""``warmroot bench overload``: more than a cluster can do, over HTTP or simulated.

Two tenants of equal shares send requests at random (Poisson), one of them ten times as many. Whoever gets 429 comes
back after ``retry-after-ms``, or gives up if that is too long for it.
"""

import asyncio
import random
import time
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

import numpy as np

from ...actors.models.source import resolve_model
from ...router.tokenizer import Tokenizer
from ..cli.flags import Parser
from ..simulate.overload import HEAVY, LIGHT, PATIENCE_S, Overload, Slo, retry_after
from .client import LoadClient, RequestFailedError, RequestRefusedError, Served
from .cluster import DTYPES, MODEL_NAME, running_cluster
from .peers.protocol import Job
from .report import Report
from .workload import LengthRange, Workloads

LOADS = (0.5, 1.0, 1.5, 2.0, 3.0)
_PROMPT, _OUTPUT = LengthRange(48, 160), LengthRange(16, 48)
_QUEUE_WAIT_S = 2.0
_TTFT_FACTOR, _ITL_FACTOR = 5.0, 8.0
_MIN_GOODPUT, _MAX_ERROR = 0.9, 0.5
_WARM_UP = 0.2
"""Share of a round's time that does not count."""
_MANY = 11
"""One request in so many is the light tenant's."""


def main(argv: Sequence[str]) -> int:
    """Measure and report. Returns 1 if a bar does not hold."""
    options = _parse(argv)
    with Report("overload", vars(options), json_only=options.json) as report:
        if options.simulated:
            _show(report, Overload(options.simulated, options.requests, seed=options.seed).curve(LOADS))
        else:
            _serve(options, report)
        return report.finish()


def _parse(argv: Sequence[str]) -> Namespace:
    parser = Parser("warmroot bench overload", "Up to three times what a cluster can do.")
    add = parser.add_argument
    add("model", nargs="?", default="smollm2", help="folder, GGUF file, hub id or smollm2")
    add("--dtype", choices=tuple(DTYPES), default="auto", help="weights and activations")
    add("--replicas", type=int, default=1, help="of the cluster")
    add(
        "--streams",
        type=int,
        default=8,
        help="sequences that a replica runs at once",
    )
    add("--seconds", type=float, default=20.0, help="of each load")
    add("--simulated", type=int, metavar="N", help="N simulated replicas instead of a cluster")
    add("--requests", type=int, default=4000, help="of each simulated load")
    add("--seed", type=int, default=0, help="of arrivals and lengths")
    add("--json", action="store_true", help="only the JSON on stdout, the table on stderr")
    return parser.read(argv)


@dataclass(slots=True)
class _Story:
    """One request, as its client lived it. Seconds since the round began."""

    job: Job
    tenant: str
    refused: list[tuple[float, float]] = field(default_factory=list[tuple[float, float]])
    sent_at: float = 0.0
    served: Served | None = None
    failed: str = ""
    """What it got that is neither an answer nor a refusal."""

    @property
    def ttft_s(self) -> float:
        """From the time when it was sent and not refused."""
        return self.times[0] - self.sent_at

    @property
    def itl_s(self) -> float:
        """Mean time between tokens."""
        return (self.times[-1] - self.times[0]) / max(1, len(self.times) - 1)

    @property
    def times(self) -> list[float]:
        """Of its tokens; none if it was not served."""
        return self.served.timing.token_times if self.served else []


def _serve(options: Namespace, report: Report) -> None:
    model = resolve_model(options.model)
    report.note("starting the cluster")
    keys = {
        "num_replicas": options.replicas,
        "max_model_len": 1024,
        "max_num_seqs": options.streams,
        "max_queue_wait": _QUEUE_WAIT_S,
        "tenant_api_key": (f"{HEAVY}={HEAVY}-key", f"{LIGHT}={LIGHT}-key"),
    }
    with running_cluster(str(model), options.dtype, **keys) as url:
        workloads = Workloads(Tokenizer.from_path(model).encode, options.seed)
        clients = {tenant: LoadClient(url, MODEL_NAME, f"{tenant}-key") for tenant in (HEAVY, LIGHT)}
        _show(report, asyncio.run(_curve(options, report, workloads, clients)))


async def _curve(
    options: Namespace, report: Report, workloads: Workloads, clients: dict[str, LoadClient]
) -> dict[str, Any]:
    rng, client = random.Random(options.seed), clients[HEAVY]
    try:
        slots = options.replicas * options.streams
        await client.closed_loop(workloads.distinct(slots, _PROMPT, _OUTPUT), slots)
        alone = await client.closed_loop(workloads.distinct(8, _PROMPT, _OUTPUT), 1)
        slo = Slo(_QUEUE_WAIT_S + _TTFT_FACTOR * _ttft(alone), _ITL_FACTOR * _itl(alone))
        began = time.perf_counter()
        count = 6 * slots
        await client.closed_loop(workloads.distinct(count, _PROMPT, _OUTPUT), slots)
        capacity = count / (time.perf_counter() - began)
        report.note(f"capacity: {capacity:.2f} requests/s; unloaded TTFT {1e3 * _ttft(alone):.0f} ms")
        rows: list[dict[str, Any]] = []
        for load in LOADS:
            arrivals = workloads.arrivals(max(20, round(load * capacity * options.seconds)), load * capacity)
            stories = [_Story(job, _tenant(rng)) for job in workloads.distinct(len(arrivals), _PROMPT, _OUTPUT)]
            began = time.perf_counter()
            await asyncio.gather(
                *(_live(story, clients[story.tenant], at, began) for story, at in zip(stories, arrivals, strict=True))
            )
            rows.append({"load": load, **_row(stories, arrivals[-1], slo)})
            report.note(f"{load:g}x: goodput {rows[-1]['goodput_rps']:.2f}/s, {len(rows[-1]['failed'])} failed")
    finally:
        for one in clients.values():
            await one.close()
    return {"capacity_rps": capacity, "slo": asdict(slo), "loads": rows}


async def _live(story: _Story, client: LoadClient, at: float, began: float) -> None:
    await asyncio.sleep(began + at - time.perf_counter())
    while story.served is None:
        story.sent_at = time.perf_counter() - began
        try:
            story.served = await client.one(story.job, began)
        except RequestRefusedError as refused:
            story.refused.append((story.sent_at, refused.retry_after_s))
            if not refused.retry_after_s <= PATIENCE_S:
                return
            await asyncio.sleep(refused.retry_after_s)
        except RequestFailedError as error:  # what becomes of the others is still to be seen
            story.failed = error.message
            return


def _row(stories: Sequence[_Story], span: float, slo: Slo) -> dict[str, Any]:
    served = [story for story in stories if story.served]
    in_time = [story for story in served if _WARM_UP * span < story.times[-1] <= span]
    good = [story for story in in_time if slo.is_met(story.ttft_s, story.itl_s)]
    seconds, ttft = (1 - _WARM_UP) * span, [story.ttft_s for story in served]
    return {
        "offered_rps": len(stories) / span,
        "served_rps": len(in_time) / seconds,
        "goodput_rps": len(good) / seconds,
        "ttft_p50_s": float(np.percentile(ttft, 50)),
        "ttft_p99_s": float(np.percentile(ttft, 99)),
        "itl_p50_s": median(story.itl_s for story in served),
        "refused_share": sum(bool(story.refused) for story in stories) / len(stories),
        "served_share": {tenant: _share(stories, tenant) for tenant in (HEAVY, LIGHT)},
        "failed": [story.failed for story in stories if story.failed],
        "retry_after": retry_after([(story.refused, story.sent_at) for story in served if story.refused]),
    }


def _show(report: Report, curve: dict[str, Any]) -> None:
    heads = (
        "load",
        "offered/s",
        "served/s",
        "goodput/s",
        "TTFT p50 s",
        "p99",
        "429",
        "light",
        "heavy",
        "error",
        "1st try",
    )
    rows = [
        (
            f"{row['load']:g}x",
            *(f"{row[name]:.2f}" for name in ("offered_rps", "served_rps", "goodput_rps", "ttft_p50_s", "ttft_p99_s")),
            f"{row['refused_share']:.0%}",
            *(f"{row['served_share'][tenant]:.0%}" for tenant in (LIGHT, HEAVY)),
            *(f"{row['retry_after'].get(name, 0):.0%}" for name in ("error_p50", "first_try")),
        )
        for row in curve["loads"]
    ]
    slo = curve["slo"]
    limits = f"TTFT {slo['ttft_s']:.2f} s, between tokens {1e3 * slo['itl_s']:.0f} ms"
    report.table(f"capacity {curve['capacity_rps']:.2f} requests/s; in time: {limits}", heads, rows)
    report.result.update(curve)
    peak, last = max(row["goodput_rps"] for row in curve["loads"]), curve["loads"][-1]
    report.bar("goodput at 3x the capacity, of its peak", last["goodput_rps"] / max(1e-9, peak), _MIN_GOODPUT)
    error = last["retry_after"].get("error_p50", 0.0)
    report.bar("median error of Retry-After at 3x", error, _MAX_ERROR, at_least=False)
    report.bar("requests that failed", sum(len(row.get("failed", ())) for row in curve["loads"]), 0, at_least=False)


def _tenant(rng: random.Random) -> str:
    return LIGHT if rng.randrange(_MANY) == 0 else HEAVY


def _share(stories: Sequence[_Story], tenant: str) -> float:
    own = [story for story in stories if story.tenant == tenant]
    return sum(story.served is not None for story in own) / max(1, len(own))


def _ttft(served: Sequence[Served]) -> float:
    return median(one.timing.token_times[0] - one.timing.start for one in served)


def _itl(served: Sequence[Served]) -> float:
    return median(
        (times[-1] - times[0]) / (len(times) - 1) for one in served if len(times := one.timing.token_times) > 1
    )
