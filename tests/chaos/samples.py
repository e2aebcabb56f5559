"""What a soak measures, once in a while: every process, KV, Redis, and latencies since the sample before."""

import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import redis

from warmroot.deploy.bench.metrics import percentile

from .clients import Outcome
from .site import REDIS_PORT, Found, Site


@dataclass(frozen=True, slots=True)
class Use:
    """Of the processes of one role together."""

    processes: int
    rss_bytes: int
    private_bytes: int
    """Memory of their own: what files mapped by several have in memory is left out."""
    descriptors: int
    threads: int


@dataclass(frozen=True, slots=True)
class Sample:
    """The site at one moment. Latencies are of the requests that ended since the sample before, in seconds."""

    at_s: float
    use: dict[str, Use]
    """By role."""
    kv_used_blocks: int
    redis_bytes: int
    requests: int
    first_event_s: dict[str, float]
    answered_in_s: dict[str, float]
    lost: int


def sample(site: Site, began: float, outcomes: Sequence[Outcome]) -> Sample:
    """Look now. ``outcomes`` are those since the sample before."""
    state = site.state() or {"replicas": []}
    firsts = [one.first_event_s for one in outcomes if one.first_event_s is not None]
    return Sample(
        at_s=round(time.monotonic() - began, 1),
        use=use(site),
        kv_used_blocks=sum(replica["kv_used_blocks"] for replica in state["replicas"]),
        redis_bytes=_redis_bytes(site),
        requests=len(outcomes),
        first_event_s=_percentiles(firsts),
        answered_in_s=_percentiles([one.ended - one.began for one in outcomes if one.complete]),
        lost=sum(bool(one.lost) for one in outcomes),
    )


def use(site: Site) -> dict[str, Use]:
    """What each role's processes use."""
    figures: dict[str, list[tuple[int, int, int, int]]] = defaultdict(list)
    for one in site.find():
        with suppress(OSError):  # it has just ended
            figures[one.role].append(_figures(one))
    return {role: Use(len(rows), *map(sum, zip(*rows, strict=True))) for role, rows in figures.items()}


def _figures(one: Found) -> tuple[int, int, int, int]:
    """(resident bytes, those of its own, descriptors, threads)."""
    folder = Path(f"/proc/{one.process.pid}")
    status: dict[str, Any] = dict(line.split(":", 1) for line in (folder / "status").read_text().splitlines())
    rss, private = (int(status[name].split()[0]) * 1024 for name in ("VmRSS", "RssAnon"))
    return rss, private, len(list((folder / "fd").iterdir())), int(status["Threads"])


def _redis_bytes(site: Site) -> int:
    with redis.Redis(site.store.address, REDIS_PORT, socket_timeout=5.0) as client:
        info: dict[str, Any] = client.info("memory")  # pyright: ignore[reportAssignmentType]
        return int(info["used_memory"])


def _percentiles(values: Sequence[float]) -> dict[str, float]:
    return {f"p{p}": round(percentile(values, p), 4) for p in (50, 90, 99)} if values else {}
