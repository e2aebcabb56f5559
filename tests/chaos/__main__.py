"""``python -m tests.chaos``: a cluster on hosts of its own, clients, and faults; ``make chaos`` runs it.

Says what happens as it goes; the last line, and the file of ``--json``, is a report as one JSON object. Exit status 1
if a stream was lost, a token wrong, a block leaked, a process orphaned, or descriptors grew.
"""

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from warmroot.deploy.bench.report import machine_facts

from ..integration.cluster_harness import wait_until
from . import report
from .answers import Answer
from .asks import Ask, AskPool
from .faults import FAULTS
from .reference import undisturbed
from .schedule import schedule
from .site import Site, Size, running_site, why_no_site
from .storm import Storm
from .ties import split_ties
from .verdict import Inventory, changes, judge, left_behind, not_audited, unexplained_cuts

IDLE_S = 60.0


def options(argv: Sequence[str]) -> argparse.Namespace:
    """Flags."""
    parser = argparse.ArgumentParser(prog="make chaos", description="Break a cluster under load.", allow_abbrev=False)
    parser.add_argument("--minutes", type=float, default=30.0, help="how long the load lasts (default: 30)")
    parser.add_argument("--seed", type=int, default=1, help="of requests, faults and victims (default: 1)")
    parser.add_argument("--every", type=float, default=20.0, help="seconds between faults (default: 20)")
    parser.add_argument("--clients", type=int, default=6, help="requests under way at a time (default: 6)")
    parser.add_argument("--pool", type=int, default=240, help="different requests (default: 240)")
    parser.add_argument("--faults", default="", help="only those whose names contain one of these, comma between")
    parser.add_argument("--solo", type=int, default=2, help="replicas of one process (default: 2)")
    parser.add_argument("--gangs", type=int, default=1, help="replicas of two ranks (default: 1)")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--json", type=Path, default=None, metavar="FILE", help="write the report there too")
    parser.add_argument("--logs", type=Path, default=None, metavar="FOLDER", help="keep the hosts' logs if it fails")
    return parser.parse_args(argv)


def say(text: str) -> None:
    """For people; the report is the last line."""
    print(text, flush=True)


def storm_over(
    site: Site, given: argparse.Namespace, asks: Sequence[Ask], reference: Sequence[Answer]
) -> dict[str, Any]:
    """The storm and its report."""
    words = [word.strip() for word in given.faults.split(",") if word.strip()]
    faults = [fault for fault in FAULTS if not words or any(word in fault.name for word in words)]
    seconds = 60 * given.minutes
    plan = schedule(given.seed, faults, seconds=seconds, every_s=given.every)
    wait_until(lambda: not site.busy(), IDLE_S, site.busy)
    before = Inventory.of(site)
    storm = Storm.over(site, asks, say)
    asyncio.run(storm.run(plan, seconds=seconds, concurrency=given.clients, seed=given.seed))
    judgement = judge(storm.clients.outcomes, reference)
    ties, wrong = split_ties(judgement.wrong, given.model)
    problems = [f"lost: {one}" for one in judgement.lost] + [f"wrong: {one}" for one in wrong]
    problems += unexplained_cuts(storm.clients.outcomes, storm.events)
    problems += at_rest(site, before)
    if problems and given.logs is not None:
        say("\n".join(problems))
        site.keep_logs(given.logs)
    events = report.recoveries(storm)
    return {
        "requests": report.requests(storm.clients.outcomes, judgement, ties),
        "faults": report.by_fault(events),
        "events": events,
        "amiss": report.amiss(storm),
        "problems": problems,
        "ok": not problems,
    }


def at_rest(site: Site, before: Inventory) -> list[str]:
    """What is wrong when nobody asks any more: blocks, processes, descriptors; and what outlives the application."""
    missing = site.what_is_amiss()
    problems = [f"not whole: {missing}"] if missing else []
    problems += [f"leaked: {held}" for held in _patiently(lambda: list(filter(None, [site.busy()])))]
    problems += changes(before, Inventory.of(site)) + not_audited(site)
    site.remove()
    return problems + _patiently(lambda: left_behind(site))


def _patiently(look: Callable[[], list[str]]) -> list[str]:
    """What is still there after a while; nothing as soon as there is nothing."""
    deadline = time.monotonic() + IDLE_S
    while (seen := look()) and time.monotonic() < deadline:
        time.sleep(0.5)
    return seen


def main(argv: Sequence[str]) -> int:
    """Run it."""
    given = options(argv)
    if reason := why_no_site():
        print(f"chaos needs hosts of its own: {reason}", file=sys.stderr)
        return 2
    say(f"==> the undisturbed run of {given.pool} requests")
    asks = AskPool(given.seed).take(given.pool)
    reference = undisturbed([(ask.path, ask.body) for ask in asks], given.model)
    size = Size(model=given.model, solo=given.solo, gangs=given.gangs)
    say(f"==> a cluster of {size.replicas} replicas on hosts of its own")
    began = time.monotonic()
    with running_site(size) as site:
        say(f"==> whole after {time.monotonic() - began:.1f} s; {given.minutes:g} minutes of storm, seed {given.seed}")
        found = storm_over(site, given, asks, reference)
    say(report.table(found["faults"]))
    for problem in found["problems"]:
        say(problem)
    parameters = {name: value for name, value in vars(given).items() if name not in ("json", "logs")}
    line = json.dumps({"chaos": parameters, "machine": machine_facts(), **found})
    if given.json is not None:
        given.json.write_text(line + "\n")
    print(line, flush=True)
    return 0 if found["ok"] else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
