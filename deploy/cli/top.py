"""``warmroot top``: what the console shows, in a terminal."""

import json
import time
from collections.abc import Callable, Sequence
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from ...cluster.errors import EngineError, ReplicaUnavailableError
from .endpoint import Endpoint, add_endpoint_flags
from .flags import Parser

QUERY = "/admin/state?prefixes={prefixes}&decisions={decisions}"
_COLOURS = ("blue", "dark_orange", "green", "magenta", "red", "cyan", "yellow", "white")
_STATES = {"ready": "green", "starting": "yellow", "draining": "yellow", "unhealthy": "red"}
_LONGEST_TEXT = 48


def main(argv: Sequence[str]) -> int:
    """Show an endpoint's state until interrupted, or once; exit code 0 if it was ready at last, else 1."""
    parser = Parser("warmroot top", "Watch a running endpoint: figures, replicas, hot prefixes, decisions.")
    add_endpoint_flags(parser)
    parser.add_argument("--once", action="store_true", help="print it once and exit")
    parser.add_argument("--json", action="store_true", help="print the state once, as JSON")
    parser.add_argument("--interval", type=float, default=1.0, metavar="S", help="seconds between looks (default: 1)")
    parser.add_argument("--prefixes", type=int, default=20, metavar="N", help="prefixes to show (default: 20)")
    parser.add_argument("--decisions", type=int, default=10, metavar="N", help="decisions to show (default: 10)")
    arguments = parser.read(argv)
    endpoint = Endpoint(arguments.url, arguments.api_key)
    path = QUERY.format(prefixes=arguments.prefixes, decisions=arguments.decisions)
    if arguments.json or arguments.once:
        state = endpoint.get(path)
        if arguments.json:
            print(json.dumps(state, indent=2))
        else:
            Console().print(screen(state))
        return 0 if state["ready"] else 1
    return _watch(lambda: endpoint.get(path), max(0.1, arguments.interval))


def screen(state: dict[str, Any]) -> Group:
    """All parts of the state that hold anything, one below the other."""
    names = {replica["replica"]: place for place, replica in enumerate(state["replicas"])}
    parts: list[RenderableType] = [_header(state), _figures(state["totals"]), _replicas(state["replicas"], names)]
    parts += [Text(f"Weights of {one['model']}: {one['stage']}", style="yellow") for one in state["updates"]]
    if state["prefixes"]:
        parts.append(_prefixes(state["prefixes"], names))
    if state["decisions"]:
        parts.append(_decisions(state["decisions"], names))
    parts += [_store(state["metadata_store"]), *_scaling(state["scaling"])]
    return Group(*parts)


def _watch(read: Callable[[], dict[str, Any]], interval_s: float) -> int:
    """Until interrupted. What was there before stays while the endpoint is away."""
    state, fault = read(), ""
    with Live(screen(state), screen=True, auto_refresh=False) as live:
        try:
            while True:
                notice = Text(f"not heard: {fault}", style="red") if fault else Text("")
                live.update(Group(screen(state), notice), refresh=True)
                time.sleep(interval_s)
                try:
                    state, fault = read(), ""
                except (ReplicaUnavailableError, EngineError) as error:
                    fault = error.message
        except KeyboardInterrupt:
            return 0 if state["ready"] and not fault else 1


def _header(state: dict[str, Any]) -> Text:
    ingress = state["ingress"]
    word = ("ready", "bold green") if state["ready"] else ("not ready", "bold red")
    models = ", ".join(state["models"]) or "no model"
    return Text.assemble(
        ("warmroot ", "bold"), word, f"  {models}  version {state['version']}  by {ingress['host']}:{ingress['pid']}"
    )


def _figures(totals: dict[str, Any]) -> Table:
    facts = {
        "Requests/s": f"{totals['requests_per_s']:.2f}",
        "Errors/s": f"{totals['failed_per_s']:.2f}",
        "Tokens/s": f"{totals['output_tokens_per_s']:.1f}",
        "TTFT p50": _seconds(totals["ttft_p50_s"]),
        "TTFT p95": _seconds(totals["ttft_p95_s"]),
        "ITL p50": _seconds(totals["itl_p50_s"]),
        "ITL p95": _seconds(totals["itl_p95_s"]),
        "Hit rate": _percent(totals["hit_rate"]),
        "Running": str(totals["running"]),
        "Waiting": str(totals["waiting"]),
    }
    table = _table(None, *facts)
    table.add_row(*facts.values())
    return table


def _replicas(replicas: Sequence[dict[str, Any]], names: dict[str, int]) -> Table:
    table = _table(
        "Replicas",
        "#",
        "Replica",
        "State",
        "Model",
        "Running",
        "Waiting",
        "KV used",
        "Hit rate",
        "KV",
        "Weights",
        "Ranks",
    )
    for replica in replicas:
        table.add_row(
            _badge(replica["replica"], names),
            _tail(replica["replica"]),
            Text(replica["state"], style=_STATES.get(replica["state"], "")),
            Text(replica["model"]),
            f"{replica['running']}/{replica['max_num_seqs']}",
            str(replica["waiting"]),
            _percent(replica["kv_cache_usage"]),
            _percent(replica["hit_rate"]),
            Text(replica["kv_format"]),
            Text(" ".join(filter(None, (replica["weights_format"], replica["weights_version"])))),
            str(len(replica["ranks"]) or "–"),
        )
    return table


def _prefixes(prefixes: Sequence[dict[str, Any]], names: dict[str, int]) -> Tree:
    """Nodes come parents first. Texts are prompts: no markup is read in them."""
    root = Tree(Text("Prefixes", style="bold"))
    branches: dict[str | None, Tree] = {}
    spaces: dict[str, Tree] = {}
    for node in prefixes:
        above = branches.get(node["parent"])
        if above is None:
            whose = (", ".join(node["tenants"]) or "private") if node["is_private"] else "shared"
            title = Text(f"{node['model']} {whose} {node['namespace']}", style="dim")
            above = spaces.get(node["namespace"]) or spaces.setdefault(node["namespace"], root.add(title))
        branches[node["id"]] = above.add(_node(node, names))
    return root


def _node(node: dict[str, Any], names: dict[str, int]) -> Text:
    line = Text(f"{node['num_tokens']:>5} tokens ")
    for replica in node["replicas"]:
        line.append_text(_badge(replica, names)).append(" ")
    if node["heat"]:
        line.append(f"{node['heat']:.0f}/s ", style="dark_orange")
    if node["text"] is not None:
        line.append(_one_line(node["text"]), style="dim")
    return line


def _decisions(decisions: Sequence[dict[str, Any]], names: dict[str, int]) -> Table:
    table = _table("Decisions", "Time", "Request", "#", "Reason", "Prompt", "Expected", "Found", "Costs")
    for decision in decisions:
        costs = Text(" ").join(
            Text.assemble(_badge(one["replica"], names), f" {_seconds(one['cost'])}")
            for one in decision["candidates"][:4]
        )
        table.add_row(
            time.strftime("%H:%M:%S", time.localtime(decision["at"])),
            _tail(decision["request_id"]),
            _badge(decision["replica"], names) if decision["replica"] else Text("–"),
            Text(decision["reason"]),
            str(decision["prompt_tokens"]),
            str(decision["predicted_tokens"]),
            "–" if decision["actual_tokens"] is None else str(decision["actual_tokens"]),
            costs,
        )
    return table


def _store(store: dict[str, Any]) -> Text:
    word = (f"away: {store['fault']}", "red") if store["fault"] else ("in touch", "green")
    lag = "" if store["lag_p95_s"] is None else f", events within {_seconds(store['lag_p95_s'])}"
    facts = f"  {store['index_blocks']:,} blocks{lag}, {store['gaps']} gaps, {store['resyncs']} resyncs"
    return Text.assemble(("Metadata store ", "bold"), Text(store["store"] + " "), word, facts)


def _scaling(steps: Sequence[dict[str, Any]]) -> list[Text]:
    return [
        Text(
            f"Autoscaling {time.strftime('%H:%M:%S', time.localtime(step['at']))} {step['model']}"
            f" {step['before']} → {step['after']}: {step['reason']}"
        )
        for step in steps[:3]
    ]


def _table(title: str | None, *headings: str) -> Table:
    table = Table(*headings, title=title, title_justify="left", title_style="bold", box=None, pad_edge=False)
    table.header_style = "dim"
    return table


def _badge(replica: str, names: dict[str, int]) -> Text:
    place = names.get(replica)
    return Text("?") if place is None else Text(str(place + 1), style=f"bold {_COLOURS[place % len(_COLOURS)]}")


def _tail(name: str) -> Text:
    return Text(name if len(name) <= 12 else f"…{name[-10:]}")


def _one_line(text: str) -> str:
    line = "".join(character if character.isprintable() else " " for character in text)
    return line if len(line) <= _LONGEST_TEXT else f"{line[: _LONGEST_TEXT - 1]}…"


def _percent(share: float | None) -> str:
    return "–" if share is None else f"{share:.0%}"


def _seconds(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value * 1e3:.1f} ms" if value < 0.1 else f"{value:.2f} s"
