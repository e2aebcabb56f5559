"""What the weights of a model are kept as once they are loaded, by what its files say."""

from dataclasses import replace
from pathlib import Path

from ...actors.models.spec import read_quantization, stored_dtype, stored_formats
from ...cluster.config import ModelConfig
from ...cluster.model_spec import ModelSpec
from ...cluster.parallel_layout import ParallelLayout
from ...cluster.topology import Topology
from ...cluster.weight_formats import ON_LOAD, WEIGHT_FORMATS, KeptWeights, weights_name


def kept_weights(model: ModelConfig, path: Path, spec: ModelSpec, device: str) -> KeptWeights:
    """What the weights of a model folder or file are kept as once they are loaded. Raises ConfigError."""
    quantization, config = model.quantization, read_quantization(path)
    on_load = quantization if quantization in ON_LOAD else ""
    if device == "cuda":
        dtype = stored_dtype(path) if model.dtype == "auto" else model.dtype
        kept = KeptWeights.plain(dtype if dtype in WEIGHT_FORMATS else "float16", on_load=on_load)
    else:
        as_stored = quantization == "auto" and model.dtype == "auto"
        kept = KeptWeights.packed(
            "float16" if model.dtype == "auto" else model.dtype,
            stored_formats(path, _linears(spec)) if as_stored else None,
            on_load=on_load,
        )
    if config is None:
        return kept
    kept = replace(kept, name=weights_name(config, quantization, kept.table.name))
    return kept if on_load or quantization == "none" else kept.with_codes(config, _linears(spec))


def _linears(spec: ModelSpec) -> list[str]:
    (whole,) = ParallelLayout.of(spec, Topology()).ranks
    return whole.linears()
