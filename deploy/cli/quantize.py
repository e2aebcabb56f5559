"""``warmroot quantize MODEL --output DIR``: a checkpoint with quantised weights, by rounding, GPTQ or AWQ."""

import os
import time
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import MofNCompleteColumn, TimeElapsedColumn, TimeRemainingColumn

from ...actors.models.source import resolve_model
from ...cluster.sizes import format_size
from ..progress_display import ProgressDisplay
from .flags import Parser

if TYPE_CHECKING:
    from ...actors.quantize.layerwise import QuantisedLayer

_WIDTH = 110
"""Columns where there is no terminal."""


def main(argv: Sequence[str]) -> int:
    """Quantise and write. Progress goes to stderr, the folder's name to stdout."""
    options = _parser().read(argv)
    console = Console(stderr=True, highlight=False)
    if not console.is_terminal:
        console.width = _WIDTH
    _quantize(options, console)
    print(options.output)
    return 0


def _parser() -> Parser:
    parser = Parser("warmroot quantize", "Write a checkpoint with quantised weights that this engine and others load.")
    add = parser.add_argument
    add("model", help="folder, GGUF file, hub id or smollm2")
    add("--output", type=Path, required=True, metavar="DIR", help="folder to write; new or empty")
    add("--method", default="gptq", help="rtn (rounding), gptq or awq (default: gptq)")
    add("--bits", type=int, default=4, help="4, or 8 with rtn and gptq (default: 4)")
    add("--group-size", type=int, default=128, help="inputs that share a scale: 32, 64, 128, or -1 for all of a row")
    add(
        "--act-order",
        nargs="?",
        const="dynamic",
        default=None,
        help="gptq: round the columns with the largest inputs first; dynamic (so without a value) makes groups of them"
        " in that order, which readers pay for; static keeps groups of neighbours; none (default: static)",
    )
    add("--symmetric", action="store_true", help="zero points in the middle of the codes; rtn and gptq")
    add("--damping", type=float, default=0.01, help="gptq: share of the mean diagonal added to it (default: 0.01)")
    add("--calibration", default="builtin", help="text file, or builtin: docstrings of Python's library")
    add("--samples", type=int, default=64, help="texts to calibrate with (default: 64)")
    add("--length", type=int, default=512, help="tokens of each (default: 512)")
    add("--threads", type=int, default=None, help="default: all cores")
    return parser


def _quantize(options: Namespace, console: Console) -> None:
    # Not before it is needed.
    import torch

    from ...actors.quantize.calibration import calibration_samples
    from ...actors.quantize.checkpoint import quantize
    from ...actors.quantize.settings import QuantizeSettings
    from ...router.tokenizer import Tokenizer

    settings = QuantizeSettings(
        method=options.method,
        bits=options.bits,
        group_size=options.group_size,
        symmetric=options.symmetric,
        act_order=options.act_order,
        damping=options.damping,
    )
    began = time.monotonic()
    torch.set_num_threads(options.threads or os.cpu_count() or 1)
    path = resolve_model(options.model, progress=console.print)
    samples: list[list[int]] = []
    if settings.needs_inputs:
        encode = Tokenizer.from_path(path).encode
        samples = calibration_samples(encode, options.calibration, num_samples=options.samples, length=options.length)
    with _LayerDisplay(console) as display:
        written = quantize(path, options.output, settings, samples, on_layer=display.show)
    share = written.quantised_bytes / written.quantised_float_bytes
    console.print(
        f"{format_size(written.total_bytes)} in {time.monotonic() - began:.0f} s; quantised layers have {share:.3f} of"
        f" their 16-bit bytes; mean output error {display.mean_error:.3%}"
    )


class _LayerDisplay(ProgressDisplay):
    """A line per layer with its linears' errors, and a bar on a terminal."""

    def __init__(self, console: Console) -> None:
        super().__init__(console, MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
        self._task = self._progress.add_task("layers", total=None)
        self._errors: list[float] = []

    @property
    def mean_error(self) -> float:
        """Over all linears."""
        return fmean(self._errors)

    def show(self, layer: "QuantisedLayer") -> None:
        """One is done."""
        self._errors += layer.errors.values()
        figures = "  ".join(f"{name.rpartition('.')[2]} {error:.3%}" for name, error in layer.errors.items())
        self.console.print(f"layer {layer.index + 1} of {layer.num_layers}  {figures}", markup=False)
        self._progress.update(self._task, completed=layer.index + 1, total=layer.num_layers)
