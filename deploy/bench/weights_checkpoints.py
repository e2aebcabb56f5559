"""Checkpoints that ``bench weights`` compares: given, or quantised on the spot."""

from argparse import Namespace
from collections.abc import Callable
from pathlib import Path

from ...actors.models.spec import read_quantization, read_spec
from ...cluster.errors import ConfigError
from ...cluster.model_spec import ModelSpec
from ...cluster.quantization_config import GROUP_SIZES
from ..cli import quantize

CHECKPOINTS = ("gptq", "awq")


def checkpoint(method: str, model: Path, options: Namespace, note: Callable[[str], None]) -> Path:
    """The folder of ``--gptq`` or ``--awq``; else one under ``--scratch``, made once. Raises ConfigError."""
    given: str | None = getattr(options, method)
    if given is not None:
        return _checked(method, Path(given).absolute())
    size = options.group_size if method == "gptq" else fitting_group(read_spec(model), options.group_size)
    folder = options.scratch.absolute() / f"{model.stem}-{method}-g{size}"
    if not (folder / "config.json").exists():
        note(f"quantising to {folder.name}")
        flags = ["--method", method, "--group-size", str(size), "--threads", str(options.threads)]
        calibration = ["--samples", str(options.samples), "--length", "512"]
        quantize.main([str(model), "--output", str(folder), *flags, *calibration])
    return folder


def _checked(method: str, folder: Path) -> Path:
    stored = read_quantization(folder)
    if stored is None or stored.quant_method != method:
        raise ConfigError(f"--{method}: {folder} holds no {method} checkpoint", param=method)
    return folder


def fitting_group(spec: ModelSpec, wanted: int) -> int:
    """The largest group size up to ``wanted`` that cuts every linear of a dense model into whole groups."""
    inputs = (spec.hidden_size, spec.num_heads * spec.head_dim, spec.intermediate_size)
    sizes = [size for size in GROUP_SIZES if 0 < size <= wanted and not any(count % size for count in inputs)]
    return max(sizes, default=-1)
