"""``warmroot bench router``: what a lookup, a decision and an event cost a router, and how fast a new one knows all."""

import json
import os
import subprocess
import sys
from argparse import BooleanOptionalAction, Namespace
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from ...kv_store.index import PrefixIndex
from ..cli.flags import Parser
from .engine import some_of
from .peers.router_rivals import RIVALS
from .report import Report
from .router_http import cpu_per_request
from .router_ingress import PROMPT_BYTES, ingress
from .router_load import FleetLoad
from .router_measure import Decisions, Joined, Timed, decisions, fill, join_in_memory, lookups
from .router_redis import join_over_redis

RIVALS_MODULE = "warmroot.deploy.bench.peers.router_rivals"

_MOST_LOOKUP_US, _MOST_DECISION_US, _LEAST_DECISIONS = 30.0, 150.0, 5000.0
_MOST_BYTES_PER_TOKEN, _LEAST_STORED = 6.0, 150_000.0
_MOST_INGRESS_MS = 0.4
PARTS = ("decision", "ingress", "join", "rivals", "fleet")
_COLUMNS = ("p50 us", "p90 us", "p99 us", "per s")
_MOST_USEFUL_S, _MOST_COMPLETE_S = 1.0, 10.0


def main(argv: Sequence[str]) -> int:
    """Measure and report. Returns 1 if a bar does not hold (never with ``--quick``)."""
    options = _parse(argv)
    with Report("router", vars(options), json_only=options.json) as report:
        _RouterBench(options, report).run()
        status = report.finish()
    return 0 if options.quick else status


def _parse(argv: Sequence[str]) -> Namespace:
    parser = Parser("warmroot bench router", "Lookups, decisions, events and start of a router, beside its rivals.")
    add = parser.add_argument
    add("--blocks", type=int, default=1_000_000, help="distinct cached blocks of 16 tokens")
    add("--replicas", type=int, default=64, help="replicas that hold them")
    add("--fleet", type=int, default=1000, help="replicas of a second, larger cluster; 0: none")
    add("--prompts", type=int, default=4000, help="prompts of 5,000 tokens; half go on with a conversation")
    add("--only", type=some_of(*PARTS), default=PARTS, help=f"some of {', '.join(PARTS)}")
    add("--rivals", action=BooleanOptionalAction, default=True, help="measure the rivals that are installed, too")
    add("--seed", type=int, default=0, help="of the load")
    add("--quick", action="store_true", help="tiny load: shows that it runs, measures nothing")
    add("--json", action="store_true", help="only the JSON on stdout, the tables on stderr")
    options = parser.read(argv)
    if options.quick:
        options.blocks, options.replicas, options.fleet, options.prompts = 8000, 4, 16, 40
    return options


class _RouterBench:
    def __init__(self, options: Namespace, report: Report) -> None:
        self._options = options
        self._report = report

    def run(self) -> None:
        """Everything, one after the other."""
        options, report = self._options, self._report
        load = FleetLoad(options.blocks, options.replicas, options.seed)
        if "decision" in options.only:
            decided = self._measure(load, "router")
            report.bar("a decision from token ids, p50 us", decided.from_ids.p50_us, _MOST_DECISION_US, at_least=False)
            report.bar("decisions from token ids per s", decided.from_ids.per_s, _LEAST_DECISIONS)
        if "ingress" in options.only:
            self._ingress(load)
        if "join" in options.only:
            self._join(load)
        if options.rivals and "rivals" in options.only:
            self._rivals()
        if options.fleet and "fleet" in options.only:
            self._measure(FleetLoad(options.blocks, options.fleet, options.seed), "large_fleet")

    def _measure(self, load: FleetLoad, name: str) -> Decisions:
        options, report = self._options, self._report
        index, replicas = PrefixIndex(), len(load.infos())
        report.note(f"{options.blocks:,} blocks over {replicas} replicas")
        applied = fill(index, load.batches())
        prompts = load.prompts(options.prompts)
        found, decided = lookups(index, load, prompts), decisions(index, load, prompts)
        rows = {
            "lookup": found,
            "decision, from ids": decided.from_ids,
            "decision, from packed ids": decided.from_packed,
            "first token and end": decided.endings,
        }
        report.table(f"{replicas} replicas", ("", *_COLUMNS), _rows(rows))
        report.result[name] = {"replicas": replicas, "lookup": found, "decision": decided, "events": applied}
        if name == "router":
            report.bar("lookup, p50 us", found.p50_us, _MOST_LOOKUP_US, at_least=False)
            report.bar("bytes per cached token", applied.bytes_per_token, _MOST_BYTES_PER_TOKEN, at_least=False)
            report.bar("stored blocks applied per s", applied.stored_blocks_per_s, _LEAST_STORED)
        return decided

    def _join(self, load: FleetLoad) -> None:
        prompts = load.prompts(self._options.prompts)
        joined: dict[str, Joined] = {"embedded": join_in_memory(load, prompts)}
        over_redis = join_over_redis(load, prompts)
        if over_redis is not None:
            joined["Redis"] = over_redis
        for bus, one in joined.items():
            self._report.bar(f"new router useful, {bus} bus, s", one.useful_s, _MOST_USEFUL_S, at_least=False)
            self._report.bar(f"new router complete, {bus} bus, s", one.complete_s, _MOST_COMPLETE_S, at_least=False)
        self._report.result["join"] = {bus: asdict(one) for bus, one in joined.items()}

    def _ingress(self, load: FleetLoad) -> None:
        index = PrefixIndex()
        fill(index, load.batches())
        spent = ingress(load, index, self._options.prompts // 4)
        self._report.table(f"A chat request of {PROMPT_BYTES:,} bytes", ("", *_COLUMNS), _rows({"ingress": spent}))
        self._report.result["ingress"] = spent
        self._report.bar("ingress CPU without tokenising, p50 ms", spent.p50_us / 1e3, _MOST_INGRESS_MS, at_least=False)

    def _rivals(self) -> None:
        options, rows = self._options, list[tuple[str, ...]]()
        found: dict[str, Any] = {}
        for name in RIVALS:
            self._report.note(f"{name}")
            found[name] = figures = _run_rival(name, options)
            for what in ("lookup", "decision"):
                if what in figures:
                    timed = Timed(**figures[what])
                    rows += _rows({f"{name}, {what}": timed})
        self._report.table("Rivals", ("", *_COLUMNS), rows)
        self._report.result["rivals"] = found
        self._report.note("routers that are HTTP servers")
        spent = cpu_per_request((options.blocks, options.replicas, options.seed), options.prompts // 2)
        self._report.table("Over HTTP", ("", "CPU ms per request"), [(name, f"{ms:.2f}") for name, ms in spent.items()])
        self._report.result["http_cpu_ms_per_request"] = spent


def _run_rival(name: str, options: Namespace) -> dict[str, Any]:
    load = (options.blocks, options.replicas, options.prompts, options.seed)
    command = [sys.executable, "-m", RIVALS_MODULE, name, *map(str, load)]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "DYN_LOG": "error"}, check=False)
    if done.returncode:
        return {"failed": done.stderr[-500:]}
    return json.loads(done.stdout.splitlines()[-1])


def _rows(figures: dict[str, Timed]) -> list[tuple[str, ...]]:
    return [
        (name, *(f"{value:.1f}" for value in (timed.p50_us, timed.p90_us, timed.p99_us)), f"{timed.per_s:,.0f}")
        for name, timed in figures.items()
    ]
