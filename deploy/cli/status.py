"""``warmroot status``."""

import json
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from ...cluster.sizes import format_size
from ..runs_on import runs_on
from .endpoint import Endpoint, add_endpoint_flags
from .flags import Parser


def main(argv: Sequence[str]) -> int:
    """Show an endpoint's state; exit code 0 if it is ready, else 1."""
    parser = Parser("warmroot status", "Show the models, replicas and load of a running endpoint.")
    add_endpoint_flags(parser)
    parser.add_argument("--json", action="store_true", help="as JSON")
    arguments = parser.read(argv)
    state = read_state(Endpoint(arguments.url, arguments.api_key))
    if arguments.json:
        print(json.dumps(state, indent=2))
    else:
        _show(state, Console())
    return 0 if state["ready"] else 1


def read_state(endpoint: Endpoint) -> dict[str, Any]:
    """What ``/admin/state`` says, and the ``url``."""
    return {"url": endpoint.url, **endpoint.get("/admin/state")}


def _show(state: dict[str, Any], console: Console) -> None:
    word = "[green]ready[/]" if state["ready"] else "[red]not ready[/]"
    models = ", ".join(state["models"]) or "no model"
    console.print(f"{state['url']}: {word}, serves {models} (version {state['version']})", highlight=False)
    console.print(_replicas(state["replicas"]))
    store = state.get("metadata_store")
    if store is not None:
        word = f"[red]routing on what is known: {store['fault']}[/]" if store["fault"] else "in touch"
        console.print(f"metadata store {store['store']}: {word}", highlight=False)
    if any(replica["ranks"] for replica in state["replicas"]):
        console.print(_ranks(state["replicas"]))
    for line in runs_on(state["replicas"]):
        console.print(line, highlight=False)


def _replicas(replicas: Sequence[dict[str, Any]]) -> Table:
    table = Table("Replica", "State")
    for heading in ("Running", "Waiting", "KV used"):
        table.add_column(heading, justify="right")
    for replica in replicas:
        table.add_row(
            replica["replica"],
            replica["state"],
            str(replica["running"]),
            str(replica["waiting"]),
            f"{replica['kv_cache_usage']:.1%}",
        )
    return table


def _ranks(replicas: Sequence[dict[str, Any]]) -> Table:
    table = Table("Replica", "Rank", "Stage", "Node")
    for heading in ("Process", "Memory", "Last step"):
        table.add_column(heading, justify="right")
    for replica in replicas:
        for rank in replica["ranks"]:
            table.add_row(
                replica["replica"],
                str(rank["rank"]),
                str(rank["stage"]),
                rank["host"],
                str(rank["pid"]),
                format_size(rank["memory_bytes"]),
                f"{rank['last_step']:,}",
            )
    return table
