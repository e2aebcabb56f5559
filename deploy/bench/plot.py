"""Cost curves as a picture. Needs matplotlib, the optional extra ``bench``."""

from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

_STYLES = ("-", "--", ":", "-.")


def draw(curves: list[dict[str, Any]], path: Path) -> None:
    """Three panels into a PNG file: decode against batch, decode against context, prefill against chunk.

    A colour per precision, a line style per number of threads.
    """
    figure = Figure(figsize=(15, 4.6), layout="constrained")
    FigureCanvasAgg(figure)
    batch, context, prefill = figure.subplots(1, 3)
    precisions = list(dict.fromkeys(curve["precision"] for curve in curves))
    threads = sorted({curve["threads"] for curve in curves}, reverse=True)
    most = max(point["batch"] for point in curves[0]["context"])
    for curve in curves:
        look = {
            "color": f"C{precisions.index(curve['precision'])}",
            "linestyle": _STYLES[threads.index(curve["threads"]) % len(_STYLES)],
            "marker": ".",
            "label": f"{curve['precision']}, {curve['threads']} threads",
        }
        _line(batch, curve["batch"], "batch", look)
        _line(context, [point for point in curve["context"] if point["batch"] == most], "context", look)
        _line(prefill, curve["prefill"], "chunk", look)
    _finish(batch, "decode", f"sequences, each of {curves[0]['batch'][0]['context']} tokens")
    _finish(context, f"decode, {most} sequences", "context in tokens")
    _finish(prefill, "prefill", "prompt in tokens")
    batch.legend()
    figure.savefig(path, dpi=150)


def _line(axes: Axes, points: list[dict[str, Any]], axis: str, look: dict[str, Any]) -> None:
    drawn = [point for point in points if point["tokens_per_s"] is not None]
    axes.plot([point[axis] for point in drawn], [point["tokens_per_s"] for point in drawn], **look)


def _finish(axes: Axes, title: str, label: str) -> None:
    axes.set(title=title, xlabel=label, ylabel="tokens/s", xscale="log", yscale="log")
    axes.grid(visible=True, which="both", alpha=0.3)
