"""A head that guesses one token after the other from a hidden state (after "Recurrent Drafter", arXiv 2403.09919).

s' = s + down(SiLU(up([norm(s), norm(e)]))), where s is at first the model's state behind its final norm, e the model's
embedding of the token that came, and norm divides by the root mean square. Logits of the next token are of s', over the
tokens of ``token_map``.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file

from ...cluster.errors import ConfigError, ModelLoadError
from ..kernels.guessing import GuessingHead
from ..kernels.library import native
from ..kernels.linear import NativeLinear
from ..layers.linear import Linear
from .decoder import Decoder
from .draft_head import head_method

MODEL_TYPE = "recurrent_head"


@dataclass(frozen=True, slots=True)
class RecurrentHead:
    """Of a model whose embedding it reads, that of the weights in use."""

    up: Linear
    down: Linear
    output: Linear
    """[hidden] -> [W]"""
    token_map: torch.Tensor
    """[W] int64: the ids of the tokens that are guessed."""
    decoder: Decoder
    native: GuessingHead | None = None
    """The same weights, where all are native."""

    @torch.inference_mode()
    def guess(
        self, state: torch.Tensor, token_ids: torch.Tensor, count: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """States [B, hidden] and the tokens [B] that came -> (states, ``count`` likeliest tokens, log-probabilities).

        The states are those that these tokens, [B, count] with the likeliest first, are guessed from.
        """
        came = self.decoder.embedding(token_ids)
        if self.native is not None:
            state, places, logprobs = self.native(state, came, count)
            return state, self.token_map[places], logprobs
        size = state.shape[1:]
        read = torch.cat((F.rms_norm(state, size), F.rms_norm(came, size)), 1)
        state = state + self.down.apply(F.silu(self.up.apply(read)))
        logits = self.output.apply(state).float()
        values, places = logits.topk(min(count, logits.shape[1]))
        return state, self.token_map[places], values - logits.logsumexp(1, keepdim=True)


def is_recurrent_head(folder: Path) -> bool:
    """Whether such a head lies in the folder, rather than Medusa's."""
    try:
        return json.loads((folder / "config.json").read_text()).get("model_type") == MODEL_TYPE
    except (OSError, ValueError):
        return False


def load_recurrent_head(folder: Path, decoder: Decoder) -> RecurrentHead:
    """The head that was trained for a model. Raises ModelLoadError, and ConfigError for that of another model."""
    try:
        tensors = load_file(folder / "model.safetensors")
        up, down, output, token_map = (
            tensors[name] for name in ("up.weight", "down.weight", "lm_head.weight", "token_map")
        )
    except (OSError, SafetensorError, KeyError) as error:
        raise ModelLoadError(f"{folder}: no recurrent head in model.safetensors: {error}") from error
    size, vocab_size = decoder.spec.hidden_size, decoder.spec.vocab_size
    if (up.shape[1], down.shape[0], output.shape[1]) != (2 * size, size, size) or int(token_map.max()) >= vocab_size:
        raise ConfigError(
            f"speculative_config: {folder} has a head for a model with hidden_size {output.shape[1]};"
            f" this one has hidden_size {size} and {vocab_size} tokens",
            param="speculative_config",
        )
    method = head_method(decoder, size, up.shape[0])
    up, down, output = (method.prepare(tensor, None) for tensor in (up, down, output))
    native_head = _native(up, down, output)
    return RecurrentHead(up, down, output, token_map.to(decoder.device), decoder, native_head)


def _native(up: Linear, down: Linear, output: Linear) -> GuessingHead | None:
    library = native()
    if library is None or not isinstance(up, NativeLinear):
        return None
    return GuessingHead(library, up, cast(NativeLinear, down), cast(NativeLinear, output))
