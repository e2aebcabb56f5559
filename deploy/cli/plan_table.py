"""The capacity plan for people."""

from typing import Any

from rich.console import Console
from rich.table import Table

from ...cluster.sizes import format_size


def show_plan(report: dict[str, Any], console: Console) -> None:
    """Print the plan, the KV formats beside one another, and the verdict."""
    console.print(_facts(report))
    console.print(_formats(report))
    console.print(_verdict(report), highlight=False)


def _facts(report: dict[str, Any]) -> Table:
    table = Table(title=report["model"], show_header=False, title_justify="left")
    for label, text in (
        ("Model", _model(report)),
        ("Split", f"tp {report['tp']} x pp {report['pp']}; the numbers are those of the fullest device"),
        ("Weights", f"{format_size(report['weight_bytes'])} as {report['dtype']}"),
        (
            "KV per token",
            f"{report['kv_token_bytes_per_layer']:,.0f} B a layer, {report['kv_token_bytes']:,.0f} B in all,"
            f" as {report['kv_format']}",
        ),
        (
            "KV per sequence",
            f"{format_size(report['kv_sequence_bytes'])} for {report['max_model_len']:,} tokens",
        ),
        (
            "Memory",
            f"{format_size(report['memory_bytes'])} of {format_size(report['device_memory'])} for weights and KV",
        ),
        ("KV memory", f"{format_size(report['kv_bytes'])}: {report['num_blocks']:,} pages"),
        ("Sequences", f"{report['max_sequences']:,} of {report['max_model_len']:,} tokens at the same time"),
    ):
        table.add_row(label, text)
    return table


def _model(report: dict[str, Any]) -> str:
    text = (
        f"{report['architecture']}, {report['parameters'] / 1e9:.3g} billion parameters, {report['num_layers']} layers,"
        f" {report['num_heads']} heads, {report['num_kv_heads']} KV heads of {report['head_dim']}"
    )
    if not report["sliding_layers"]:
        return text
    return f"{text}, {report['sliding_layers']} layers see {report['sliding_window']:,} tokens"


def _formats(report: dict[str, Any]) -> Table:
    table = Table("KV format")
    for heading in ("B per token", "per sequence", "sequences"):
        table.add_column(heading, justify="right")
    for name, row in report["kv_formats"].items():
        table.add_row(
            name if row["served"] else f"{name} (planned)",
            f"{row['kv_token_bytes']:,.0f}",
            format_size(row["kv_sequence_bytes"]),
            f"{row['max_sequences']:,}",
            style="bold" if name == report["kv_format"] else None,
        )
    return table


def _verdict(report: dict[str, Any]) -> str:
    if report["fits"]:
        return (
            f"[green]Fits[/]: {report['devices']} device(s) hold the model and {report['max_sequences']:,} sequences."
        )
    missing = format_size(report["missing_bytes"])
    what = "the weights alone do" if report["limit"] == "weights" else "weights and one full sequence do"
    text = f"[red]Does not fit[/]: {what} not; each device lacks {missing} for weights and one sequence."
    if report["limit"] == "sequence" and report["max_cached_tokens"]:
        text += f" With --max-model-len {report['max_cached_tokens']} it fits."
    if report["smallest_fit"]:
        fit = report["smallest_fit"]
        text += f" Enough: --tp {fit['tp']} --pp {fit['pp']}."
    return text
