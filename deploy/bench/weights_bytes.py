"""Bytes that weights take in memory, by the form they are kept in."""

from pathlib import Path
from typing import NamedTuple

from ...actors.models.spec import read_spec
from ...cluster.config_file import load_config
from ...cluster.model_tensors import dim_sizes
from ...cluster.parallel_layout import ParallelLayout
from ...cluster.topology import Topology
from ..cli.plan_weights import kept_weights
from .peers.warmroot_model import weights_format


class WeightBytes(NamedTuple):
    """Scales and zero points included; second copies that a machine may find faster are not."""

    linears: int
    """Of the layers' linears: embedding and head are not among them."""
    total: int
    """Of the whole model."""


def weight_bytes(path: Path, precision: str) -> WeightBytes:
    """Of a model in one of the bench's precisions."""
    dtype, quantization = weights_format(precision)
    spec = read_spec(path)
    config = load_config({"model": str(path), "dtype": dtype, "quantization": quantization})
    kept = kept_weights(config.model, path, spec, "cpu")
    (whole,) = ParallelLayout.of(spec, Topology()).ranks
    sizes, tensors = dim_sizes(spec), whole.tensors()
    linears = sum(
        kept.linear_bytes(name, *(sizes[dim] for dim in tensors[name]))
        for name in whole.linears()
        if ".layers." in name
    )
    return WeightBytes(linears, whole.weight_bytes(kept))
