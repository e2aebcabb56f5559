"""Simulated policies as a picture. Needs matplotlib, the optional extra ``bench``."""

import html
from collections.abc import Mapping
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from .results import Results

_COLUMNS = ("hit_rate", "ttft_mean_s", "ttft_p50_s", "ttft_p90_s", "ttft_p99_s", "e2e_mean_s", "tpot_mean_s")


def draw(runs: Mapping[str, Results], title: str, path: Path) -> None:
    """Distribution of times to first token, and hits against waiting, into a PNG file and an HTML page beside it."""
    figure = Figure(figsize=(12, 4.6), layout="constrained")
    FigureCanvasAgg(figure)
    distribution, exchange = figure.subplots(1, 2)
    for name, results in runs.items():
        ttft = np.sort(results.ttft_s[~np.isnan(results.ttft_s)]) * 1e3
        distribution.plot(ttft, np.linspace(0, 1, len(ttft)), label=name)
        summary = results.summary()
        exchange.scatter([summary["hit_rate"]], [summary["ttft_mean_s"] * 1e3])
        exchange.annotate(name, (summary["hit_rate"], summary["ttft_mean_s"] * 1e3), fontsize="small")
    distribution.set(title=title, xlabel="time to first token, ms", ylabel="share of requests", xscale="log")
    exchange.set(
        title="cached prompt tokens and mean time to first token", xlabel="hit rate", ylabel="ms", yscale="log"
    )
    distribution.legend(fontsize="small")
    for axes in (distribution, exchange):
        axes.grid(visible=True, which="both", alpha=0.3)
    figure.savefig(path, dpi=150)
    picture = StringIO()
    figure.savefig(picture, format="svg")
    path.with_suffix(".html").write_text(_page(title, picture.getvalue(), runs))


def _page(title: str, svg: str, runs: Mapping[str, Results]) -> str:
    rows: list[str] = []
    for name, results in runs.items():
        summary: dict[str, Any] = results.summary()
        cells = "".join(f"<td>{summary[column]:.4g}</td>" for column in _COLUMNS)
        rows.append(f"<tr><th>{html.escape(name)}</th>{cells}</tr>")
    heads = "".join(f"<th>{column}</th>" for column in _COLUMNS)
    table = f"<table><tr><th></th>{heads}</tr>{''.join(rows)}</table>"
    style = "body{font:14px sans-serif;margin:2em}td,th{padding:.2em .8em;text-align:right}svg{max-width:100%}"
    return (
        f"<!doctype html><meta charset=utf-8><title>{html.escape(title)}</title><style>{style}</style>"
        f"<h1>{html.escape(title)}</h1>{svg[svg.index('<svg') :]}{table}"
    )
