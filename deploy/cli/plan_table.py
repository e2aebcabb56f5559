"""The capacity plan for people, on lines of at most 100 columns."""

from itertools import groupby
from typing import Any

from rich.console import Console
from rich.table import Table

from ...cluster.sizes import format_size

Report = dict[str, Any]
_MOST_ROWS = 4
"""More ranks are shown as one row for those that are alike."""


def show_plan(report: Report, console: Console) -> None:
    """Print the plan, the ranks, what they send, the KV formats beside one another, and the verdict."""
    console.print(_facts(report))
    if report["devices"] > 1:
        console.print(_ranks(report))
        console.print(_sends(report))
    console.print(_formats(report))
    console.print(_verdict(report), highlight=False)


def _facts(report: Report) -> Table:
    table = Table(title=report["model"], show_header=False, title_justify="left")
    for label, text in (
        ("Model", _model(report)),
        ("Split", _split(report)),
        ("Weights", _weights(report)),
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
        ("KV memory", _kv_memory(report)),
        ("Sequences", f"{report['max_sequences']:,} of {report['max_model_len']:,} tokens at the same time"),
    ):
        table.add_row(label, text)
    return table


def _model(report: Report) -> str:
    kv = (
        f"a latent of {report['latent_size']} elements cached"
        if report["latent_size"]
        else f"{report['num_kv_heads']} KV heads of {report['head_dim']}"
    )
    text = (
        f"{report['architecture']}, {report['parameters'] / 1e9:.3g} billion parameters, {report['num_layers']} layers,"
        f" {report['num_heads']} heads, {kv}"
    )
    if report["num_experts"]:
        text += (
            f", {report['num_experts']} experts in {report['sparse_layers']} layers,"
            f" {report['experts_per_token']} for each token"
        )
    if report["sliding_layers"]:
        text += f", {report['sliding_layers']} layers see {report['sliding_window']:,} tokens"
    return text


def _weights(report: Report) -> str:
    text, copied = f"{format_size(report['weight_bytes'])} as {report['dtype']}", report["copied_weight_bytes"]
    if report["draft_weight_bytes"]:
        text += f", {format_size(report['draft_weight_bytes'])} for drafts"
    if not copied:
        return text
    return f"{text}, and {format_size(copied)} more where FBGEMM is faster for some numbers of rows"


def _kv_memory(report: Report) -> str:
    text = f"{format_size(report['kv_bytes'])}: {report['num_blocks']:,} pages"
    if not report["open_pages"]:
        return text
    size = format_size(report["open_pages"] * report["open_page_bytes"])
    return f"{text}, and {size} for up to {report['open_pages']:,} that tokens still join"


def _split(report: Report) -> str:
    sizes = f"tp {report['tp']} x pp {report['pp']}"
    if report["num_experts"]:
        sizes += f", experts over {report['ep']}"
    if report["num_redundant_experts"]:
        sizes += f" with {report['num_redundant_experts']} copies"
    if report["data_parallel_groups"] > 1:
        sizes += f", {report['data_parallel_groups']} groups with requests of their own"
    return sizes if report["devices"] == 1 else f"{sizes}; the numbers are those of the tightest rank"


def _ranks(report: Report) -> Table:
    headings = ["Rank", "Stage", "Layers", "Heads", "KV heads", "Experts", "Weights", "KV per token", "KV memory"]
    has_experts = report["num_experts"] > 0
    if not has_experts:
        headings.remove("Experts")
    table = Table(*headings)
    for column in table.columns[3:]:
        column.justify = "right"
    for numbers, row in _folded(report):
        table.add_row(numbers, *(row if has_experts else row[:4] + row[5:]))
    return table


def _folded(report: Report) -> list[tuple[str, list[str]]]:
    """(ranks, cells): a row for each rank, or for neighbours that are alike where there are many."""
    rows = [_cells(rank, report) for rank in report["ranks"]]
    if len(rows) <= _MOST_ROWS:
        return [(str(number), row) for number, row in enumerate(rows)]
    folded: list[tuple[str, list[str]]] = []
    for row, alike in groupby(enumerate(rows), key=lambda numbered: numbered[1]):
        first, *others = (number for number, _ in alike)
        folded.append((f"{first}-{others[-1]}" if others else str(first), row))
    return folded


def _cells(rank: Report, report: Report) -> list[str]:
    ends = [name for name, is_held in (("embedding", rank["has_embedding"]), ("head", rank["has_head"])) if is_held]
    layers = f"{rank['first_layer']}-{rank['first_layer'] + rank['num_layers'] - 1}"
    return [
        str(rank["stage"]),
        " + ".join([layers, *ends]) if report["pp"] > 1 else layers,
        str(rank["heads"][1] - rank["heads"][0]),
        "latent" if report["latent_size"] else str(rank["kv_heads"][1] - rank["kv_heads"][0]),
        str(len(rank["experts"])),
        format_size(rank["weight_bytes"]),
        f"{rank['kv_token_bytes']:,.0f} B",
        format_size(rank["kv_bytes"]),
    ]


def _sends(report: Report) -> Table:
    """For each purpose, the rank that hands over the most."""
    most: dict[str, Report] = {}
    for rank in report["ranks"]:
        for sent in rank["sends"]:
            known = most.get(sent["purpose"])
            if known is None or sent["bytes_per_step"] > known["bytes_per_step"]:
                most[sent["purpose"]] = sent
    tokens = report["step"]["tokens"]
    table = Table("A rank sends", "By", title=f"In a step of {tokens} decoding sequences", title_justify="left")
    for heading in ("over", "times", "B per token", "B per layer", "B per step"):
        table.add_column(heading, justify="right")
    for purpose, sent in most.items():
        layer = sent["bytes_per_layer"]
        table.add_row(
            purpose,
            sent["operation"],
            f"{sent['group_size']} ranks",
            str(sent["operations"]),
            f"{sent['bytes_per_token']:,.0f}",
            "" if layer is None else f"{layer:,.0f}",
            f"{sent['bytes_per_step']:,.0f}",
        )
    return table


def _formats(report: Report) -> Table:
    table = Table("KV format")
    for heading in ("B per token", "per sequence", "sequences"):
        table.add_column(heading, justify="right")
    for name, row in report["kv_formats"].items():
        table.add_row(
            name if row["served"] else f"{name} (not served)",
            f"{row['kv_token_bytes']:,.0f}",
            format_size(row["kv_sequence_bytes"]),
            f"{row['max_sequences']:,}",
            style="bold" if name == report["kv_format"] else None,
        )
    return table


def _verdict(report: Report) -> str:
    devices = "1 device holds" if report["devices"] == 1 else f"{report['devices']} devices hold"
    if report["fits"]:
        return f"[green]Fits[/]: {devices} the model and {report['max_sequences']:,} sequences."
    missing = format_size(report["missing_bytes"])
    what = "the weights alone do" if report["limit"] == "weights" else "weights and one full sequence do"
    text = f"[red]Does not fit[/]: {what} not; a device lacks {missing} for weights and one sequence."
    if report["limit"] == "sequence" and report["max_cached_tokens"]:
        text += f" With --max-model-len {report['max_cached_tokens']} it fits."
    if report["smallest_fit"]:
        text += f" Enough: {_flags(report['smallest_fit'])}."
    return text


def _flags(fit: dict[str, int]) -> str:
    experts = " --enable-expert-parallel" if fit["ep"] > 1 else ""
    return f"--tp {fit['tp']} --pp {fit['pp']}{experts}"
