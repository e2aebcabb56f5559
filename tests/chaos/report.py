"""What is told of a storm: one JSON object, and tables for people."""

import statistics
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

from warmroot.deploy.bench.metrics import percentile

from .clients import Outcome
from .storm import Event, Storm
from .verdict import Judgement, Wrong
from .watch import recovered


def recoveries(storm: Storm) -> list[dict[str, Any]]:
    """Each fault with its moment, victim and times; what is amiss when the next one strikes counts to both."""
    events = sorted(storm.events, key=lambda event: event.at)
    ends = [later.at for later in events[1:]] + [float("inf")]
    return [_recovery(storm, event, end) for event, end in zip(events, ends, strict=True)]


def _recovery(storm: Storm, event: Event, end: float) -> dict[str, Any]:
    hit = {"at_s": round(event.at - storm.began, 2), "fault": event.fault.name, "target": event.target}
    if not event.target:
        return hit
    during = [moment for outcome in storm.clients.outcomes for moment, _ in outcome.cuts if event.at <= moment < end]
    return hit | {
        "served_s": recovered(storm.watch.probes, event.at, end),
        "whole_s": (whole := recovered(storm.watch.looks, event.at, end)),
        "met_by_the_next": whole is None or event.at + whole > end,
        "failed_probes": sum(bool(look.amiss) for look in storm.watch.probes if event.at <= look.began < end),
        "cut_connections": len(during),
    }


def amiss(storm: Storm) -> list[tuple[float, str]]:
    """What was missing from when on, each time that it changed; empty: nothing."""
    seen: list[tuple[float, str]] = []
    for look in storm.watch.looks:
        if not seen or seen[-1][1] != look.amiss:
            seen.append((round(look.began - storm.began, 1), look.amiss))
    return seen


def by_fault(events: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Times of each kind of fault: seconds until a new request is served as usual, and until nothing is missing."""
    kinds: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for event in events:
        kinds[event["fault"]].append(event)
    return {
        name: {
            "strikes": sum(bool(event["target"]) for event in kind),
            "without_victim": sum(not event["target"] for event in kind),
            "served_s": _middle_and_most(kind, "served_s"),
            "whole_s": _middle_and_most(kind, "whole_s"),
            "met_by_the_next": sum(event.get("met_by_the_next", False) for event in kind),
            "failed_probes": sum(event.get("failed_probes", 0) for event in kind),
            "cut_connections": sum(event.get("cut_connections", 0) for event in kind),
        }
        for name, kind in sorted(kinds.items())
    }


def _middle_and_most(kind: Sequence[dict[str, Any]], key: str) -> dict[str, Any]:
    values = [event[key] for event in kind if event.get(key) is not None]
    return {
        "median": round(statistics.median(values), 2) if values else None,
        "most": round(max(values), 2) if values else None,
    }


def requests(outcomes: Sequence[Outcome], judgement: Judgement, ties: Sequence[Wrong]) -> dict[str, Any]:
    """How they ended."""
    first = [one.first_event_s for one in outcomes if one.first_event_s is not None]
    whole = [one.ended - one.began for one in outcomes if one.complete]
    refusals: Counter[str] = Counter()
    for one in outcomes:
        refusals += one.refusals
    return {
        "sent": len(outcomes),
        "by_kind": Counter(one.ask.kind for one in outcomes),
        "answered": sum(one.complete for one in outcomes),
        "left": sum(not one.complete and not one.lost for one in outcomes),
        "lost": sum(bool(one.lost) for one in outcomes),
        "told_to_try_again": refusals,
        "cut_connections": sum(len(one.cuts) for one in outcomes),
        "cut_by": Counter(how for one in outcomes for _, how in one.cuts),
        "equal": judgement.equal,
        "wrong": len(judgement.wrong) - len(ties),
        "ties": list(map(str, ties)),
        "tokens_compared": judgement.tokens,
        "largest_logprob_error": judgement.logprob_error,
        "first_event_s": {f"p{p}": round(percentile(first, p), 3) for p in (50, 99, 100)},
        "answered_in_s": {f"p{p}": round(percentile(whole, p), 3) for p in (50, 99, 100)},
    }


def table(faults: dict[str, dict[str, Any]]) -> str:
    """Recovery times, for people."""
    rows = [("fault", "strikes", "served after", "whole after", "cut")]
    rows += [
        (name, str(f["strikes"]), _times(f["served_s"]), _times(f["whole_s"]), str(f["cut_connections"]))
        for name, f in faults.items()
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)


def _times(times: dict[str, Any]) -> str:
    if times["median"] is None:
        return "-"
    return f"{times['median']:.1f} s, at most {times['most']:.1f} s"
