"""Samples of a soak as a picture."""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from .samples import Sample


def draw(samples: Sequence[Sample], path: Path) -> None:
    """Memory and descriptors by role, and latencies, over time, into a PNG file."""
    figure = Figure(figsize=(15, 4.6), layout="constrained")
    FigureCanvasAgg(figure)
    memory, descriptors, latency = figure.subplots(1, 3)
    minutes = [one.at_s / 60 for one in samples]
    for role in samples[-1].use:
        uses = [one.use.get(role) for one in samples]
        memory.plot(minutes, [use and use.private_bytes / 2**20 for use in uses], label=role)
        descriptors.plot(minutes, [use and use.descriptors for use in uses], label=role)
    for name, figures in (("first event", "first_event_s"), ("answered", "answered_in_s")):
        for p in ("p50", "p99"):
            latency.plot(minutes, [getattr(one, figures).get(p) for one in samples], label=f"{name}, {p}")
    memory.set(title="memory of their own", ylabel="MiB")
    descriptors.set(title="descriptors")
    latency.set(title="latency", ylabel="s", yscale="log")
    for axes in (memory, descriptors, latency):
        axes.set_xlabel("minutes")
        axes.grid(visible=True, alpha=0.3)
        axes.legend(fontsize="small")
    figure.savefig(path, dpi=150)
