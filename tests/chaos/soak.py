"""``python -m tests.chaos.soak``: hours at part of the capacity, without any fault; ``make soak`` runs it.

Measures what the cluster can do, then sends 70 % of that at random moments and takes a sample of everything once a
minute. The last line is a report as one JSON object. Exit status 1 if memory or descriptors grew, answers became
slower, or a request was lost.
"""

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from warmroot.deploy.bench.report import machine_facts

from .asks import AskPool
from .clients import Clients
from .samples import Sample, sample
from .site import KEYS, Site, Size, running_site, why_no_site
from .soak_plot import draw
from .trend import MOST_GROWTH, MOST_NEW_DESCRIPTORS, MOST_SLOWER, fit, slower

CAPACITY_S = 90.0
CAPACITY_CLIENTS = 12
MOST_REDIS_BYTES = 40 * 2**20
"""For each replica: its stream grows to 32 MiB beside the snapshot before its older half is cut off (docs/redis.md)."""


def options(argv: Sequence[str]) -> argparse.Namespace:
    """Flags."""
    parser = argparse.ArgumentParser(prog="make soak", description="Run a cluster for long.", allow_abbrev=False)
    parser.add_argument("--hours", type=float, default=2.0, help="how long the load lasts (default: 2)")
    parser.add_argument("--load", type=float, default=0.7, help="share of the measured capacity (default: 0.7)")
    parser.add_argument("--every", type=float, default=60.0, help="seconds between samples (default: 60)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--pool", type=int, default=2000, help="different requests (default: 2000)")
    parser.add_argument("--solo", type=int, default=2, help="replicas of one process (default: 2)")
    parser.add_argument("--gangs", type=int, default=0, help="replicas of two ranks (default: 0)")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--json", type=Path, default=None, metavar="FILE", help="write the report there too")
    parser.add_argument("--plot", type=Path, default=None, metavar="FILE.png", help="draw the samples (matplotlib)")
    return parser.parse_args(argv)


async def capacity(clients: Clients, seed: int) -> float:
    """Requests a second that a closed loop gets through; the first third of the time does not count."""
    load = asyncio.create_task(clients.run(CAPACITY_CLIENTS, seed, pause_s=0.0))
    await asyncio.sleep(CAPACITY_S / 3)
    before, began = len(clients.outcomes), time.monotonic()
    await asyncio.sleep(CAPACITY_S * 2 / 3)
    rate = (len(clients.outcomes) - before) / (time.monotonic() - began)
    clients.stop()
    await load
    return rate


async def soak(site: Site, clients: Clients, per_s: float, given: argparse.Namespace) -> list[Sample]:
    """Load, and a sample every so often."""
    began, seen = time.monotonic(), 0
    samples: list[Sample] = []
    load = asyncio.create_task(clients.arrive(per_s, given.seed))
    while time.monotonic() < began + 3600 * given.hours:
        await asyncio.sleep(min(given.every, began + 3600 * given.hours - time.monotonic()))
        new, seen = clients.outcomes[seen:], len(clients.outcomes)
        samples.append(await asyncio.to_thread(sample, site, began, new))
        print(_line(samples[-1]), flush=True)
    clients.stop()
    await load
    return samples


def judged(samples: Sequence[Sample]) -> tuple[dict[str, Any], list[str]]:
    """The trends, and which of them are too steep."""
    trends: dict[str, Any] = {}
    problems = [f"lost: {one.lost} requests before {one.at_s:.0f} s" for one in samples if one.lost]
    for role in samples[-1].use:
        uses = [one.use[role] for one in samples if role in one.use]
        memory = {kind: fit([getattr(use, kind) for use in uses]) for kind in ("rss_bytes", "private_bytes")}
        descriptors, threads = (fit([getattr(use, kind) for use in uses]) for kind in ("descriptors", "threads"))
        trends[role] = {kind: {**asdict(trend), "growth": trend.growth} for kind, trend in memory.items()}
        trends[role] |= {"descriptors": asdict(descriptors), "threads": asdict(threads)}
        problems += [
            f"memory: {kind} of {role} grew by {trend.growth:.1%}"
            for kind, trend in memory.items()
            if trend.growth > MOST_GROWTH and role != "redis"
        ]
        if descriptors.change > MOST_NEW_DESCRIPTORS * uses[-1].processes:
            problems.append(f"descriptors: those of {role} grew by {descriptors.change:.1f}")
    for name in ("first_event_s", "answered_in_s"):
        ratio = slower([getattr(one, name)["p50"] for one in samples if getattr(one, name)])
        trends[name] = {"last_third_over_first": ratio}
        if ratio > MOST_SLOWER:
            problems.append(f"latency: {name} is {ratio:.2f} times what it was")
    redis, bound = max(one.redis_bytes for one in samples), MOST_REDIS_BYTES * samples[-1].use["replica"].processes
    trends["redis_bytes"] = {"most": redis, "bound": bound}
    if redis > bound:
        problems.append(f"memory: Redis holds {redis} bytes, more than {bound}")
    return trends, problems


def _line(one: Sample) -> str:
    memory = ", ".join(f"{role} {use.rss_bytes / 2**20:.0f}" for role, use in sorted(one.use.items()))
    median = one.answered_in_s.get("p50", float("nan"))
    return f"{one.at_s:7.0f} s  {one.requests} requests, median {median:.2f} s, {one.lost} lost; MiB: {memory}"


def main(argv: Sequence[str]) -> int:
    """Run it."""
    given = options(argv)
    if reason := why_no_site():
        print(f"soak needs hosts of its own: {reason}", file=sys.stderr)
        return 2
    asks = AskPool(given.seed).take(given.pool)
    with running_site(Size(model=given.model, solo=given.solo, gangs=given.gangs)) as site:
        able = asyncio.run(capacity(Clients(site.urls, KEYS, given.model, asks), given.seed))
        print(f"==> {able:.2f} requests/s at most; {given.hours:g} hours at {given.load:.0%} of that", flush=True)
        clients = Clients(site.urls, KEYS, given.model, asks)
        samples = asyncio.run(soak(site, clients, able * given.load, given))
        trends, problems = judged(samples)
        site.wait_whole(60.0)
    if given.plot is not None:
        draw(samples, given.plot)
    parameters = {name: value for name, value in vars(given).items() if name not in ("json", "plot")}
    found = {"capacity_per_s": able, "trends": trends, "problems": problems, "ok": not problems}
    line = json.dumps({"soak": parameters, "machine": machine_facts(), **found, "samples": list(map(asdict, samples))})
    if given.json is not None:
        given.json.write_text(line + "\n")
    print("\n".join([*problems, line]), flush=True)
    return 0 if not problems else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
