"""Weights that are loaded and checked beside those in use, until a step adopts them."""

from dataclasses import fields, replace
from pathlib import Path

import torch

from ...cluster.errors import EngineError, ModelLoadError
from ...cluster.model_spec import ModelSpec
from ..models.decoder import Decoder
from ..models.loader import make_decoder, open_source
from ..models.spec import read_spec
from ..models.weights import WeightSource
from ..parallel.shard import Shard


class NextWeights:
    """Of one rank. ``prepare`` may run on any thread; ``adopt`` is called between two steps."""

    def __init__(self, decoder: Decoder, shard: Shard, *, dtype: str, quantization: str) -> None:
        """``decoder`` is the one in use, loaded for ``shard`` with that ``dtype`` and ``quantization``."""
        self._decoder = decoder
        self._shard = shard
        # On a GPU "auto" was decided by the first weights: what is cached and computed keeps its dtype.
        self._dtype = dtype if decoder.device.type == "cpu" else str(decoder.dtype).removeprefix("torch.")
        self._quantization = quantization
        self._next: tuple[str, Decoder] | None = None

    def prepare(self, version: str, source: WeightSource | Path) -> str:
        """Load them; returns the form in which they are kept. Those prepared before are dropped.

        Raises ModelLoadError where they are not of the same model, cannot be read, or are not finite.
        """
        self.discard()
        if isinstance(source, Path):
            check_same_model(self._shard.layout.spec, read_spec(source), source)
            source = open_source(source)
        with torch.inference_mode():
            loaded = make_decoder(
                source,
                self._shard,
                dtype=self._dtype,
                device=self._decoder.device,
                quantization=self._quantization,
                must_be_finite=True,
            )
        self._next = version, loaded
        return loaded.weights_format

    def discard(self) -> None:
        """Let go of what was prepared, if anything was."""
        self._next = None

    def adopt(self, version: str) -> None:
        """Raises EngineError where no such weights were prepared."""
        if self._next is None or self._next[0] != version:
            raise EngineError(f"no weights of version {version} were prepared")
        self._decoder.take_over(self._next[1])
        self._next = None


def check_same_model(spec: ModelSpec, other: ModelSpec, path: Path) -> None:
    """Raise ModelLoadError unless ``other`` computes as ``spec`` does. Special tokens and the context may differ."""
    other = replace(
        other, bos_token_id=spec.bos_token_id, eos_token_ids=spec.eos_token_ids, max_position=spec.max_position
    )
    differing = [field.name for field in fields(spec) if getattr(spec, field.name) != getattr(other, field.name)]
    if differing:
        told = ", ".join(f"{name} {getattr(other, name)!r} is not {getattr(spec, name)!r}" for name in differing)
        raise ModelLoadError(f"{path}: not the model that is served: {told}"[:500])
