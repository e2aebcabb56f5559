"""The head of a drafting model over the tokens that are drafted often."""

from copy import copy
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from ...cluster.errors import ModelLoadError
from ...cluster.model_tensors import HEAD
from ..kernels.linear import GROUP, NativeMethod, WeightFormat
from ..layers.linear import DenseMethod, Linear, LinearMethod
from .decoder import Decoder
from .loader import load_model

DRAFT_HEAD = "draft_head.safetensors"
"""File beside a drafting model's own: ``lm_head.weight`` [W, hidden] and ``token_map`` [W] int64."""
TOKEN_MAP = "token_map"
_NEVER = -1e30
"""Logit of a token that is not there. Finite: where a request allows no other, all of these are equally likely."""


@dataclass(frozen=True, slots=True)
class ReducedHead:
    """Logits of the whole vocabulary, of which only some are computed. Implements ``Linear``."""

    linear: Linear
    token_map: torch.Tensor
    """[W] int64: the ids of those."""
    vocab_size: int

    def apply(self, x: torch.Tensor) -> torch.Tensor:
        """[R, hidden] -> [R, vocab] float32."""
        known = self.linear.apply(x).float()
        logits = torch.full((len(x), self.vocab_size), _NEVER, device=x.device)
        # A third of the time that indexing takes.
        return logits.scatter_(1, self.token_map.expand_as(known), known)


def load_draft_model(path: Path, *, dtype: str, device: torch.device) -> Decoder:
    """A drafting model, with the reduced head that lies in its folder if there is one.

    ``dtype`` is as for ``load_model``. Raises what that raises, and ModelLoadError for a head that does not fit.
    """
    decoder = load_model(path, dtype=dtype, device=device)
    file = path / DRAFT_HEAD
    if not file.is_file():
        return decoder
    weight, token_map = _read(file)
    shape, vocab_size = (len(token_map), decoder.spec.hidden_size), decoder.spec.vocab_size
    if weight.shape != shape or not 0 <= int(token_map.min()) <= int(token_map.max()) < vocab_size:
        raise ModelLoadError(f"{file}: {HEAD} {list(weight.shape)} and {TOKEN_MAP} do not fit the model beside them")
    reduced = copy(decoder)
    linear = head_method(decoder, decoder.spec.hidden_size).prepare(weight, None)
    reduced.head = ReducedHead(linear, token_map.to(decoder.device), vocab_size)
    return reduced


def _read(file: Path) -> tuple[torch.Tensor, torch.Tensor]:
    try:
        tensors = load_file(file)
        return tensors[HEAD], tensors[TOKEN_MAP]
    except (OSError, SafetensorError, KeyError) as error:
        raise ModelLoadError(f"{file}: {HEAD} and {TOKEN_MAP} cannot be read: {error}") from error


def head_method(decoder: Decoder, *in_features: int) -> LinearMethod:
    """How linears of so many ``in_features`` are computed that draft for a model, or in it.

    On a CPU in 8 bits where the groups of these divide them: half the bytes, and several rows at a time several times
    as fast. Guesses need not be exact.
    """
    if decoder.device.type != "cpu" or not NativeMethod.is_available():
        return DenseMethod(decoder.dtype, decoder.device)
    return NativeMethod(WeightFormat.F16 if any(size % GROUP for size in in_features) else WeightFormat.Q8)
