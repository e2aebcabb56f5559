"""A head that guesses one token after the other from a hidden state (after "Recurrent Drafter", arXiv 2403.09919).

s' = s + down(SiLU(up([norm(s), norm(e)]))), where s is at first the model's state behind its final norm, e the model's
embedding of the token that came, and norm divides by the root mean square. Logits of the next token are of s', over the
tokens of ``token_map``.
"""

import json
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file

from ...cluster.errors import ConfigError, ModelLoadError
from ..layers.embedding import Embedding
from ..layers.linear import Linear
from .decoder import Decoder
from .draft_head import ReducedHead, head_method

MODEL_TYPE = "recurrent_head"


@dataclass(frozen=True, slots=True)
class RecurrentHead:
    """Of a model whose embedding it reads."""

    up: Linear
    down: Linear
    output: ReducedHead
    embedding: Embedding

    @torch.inference_mode()
    def advance(self, state: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
        """States [B, hidden] and the tokens [B] that came -> the states that the next ones are guessed from."""
        size = state.shape[1:]
        read = torch.cat((F.rms_norm(state, size), F.rms_norm(self.embedding(token_ids), size)), 1)
        return state + self.down.apply(F.silu(self.up.apply(read)))


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
    return RecurrentHead(
        method.prepare(up, None),
        method.prepare(down, None),
        ReducedHead(method.prepare(output, None), token_map.to(decoder.device), vocab_size),
        decoder.embedding,
    )
