"""The loss of a training as a picture. Needs matplotlib, the optional extra ``bench``."""

from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

_SMOOTHED = 50


def draw_losses(losses: list[tuple[float, float]], path: Path) -> None:
    """(seconds, loss in nats) of every step into a PNG file, with a running mean."""
    figure = Figure(figsize=(7, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    minutes, values = [seconds / 60 for seconds, _ in losses], [loss for _, loss in losses]
    axes.plot(minutes, values, linewidth=0.5, alpha=0.4, color="C0", label="step")
    axes.plot(minutes, _running_mean(values), color="C0", label=f"mean of {_SMOOTHED}")
    axes.set(xlabel="minutes of training", ylabel="loss in nats")
    axes.grid(visible=True, alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=150)


def _running_mean(values: list[float]) -> list[float]:
    means: list[float] = []
    total = 0.0
    for index, value in enumerate(values):
        total += value - (values[index - _SMOOTHED] if index >= _SMOOTHED else 0.0)
        means.append(total / min(index + 1, _SMOOTHED))
    return means
