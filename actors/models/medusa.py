"""Medusa heads: guesses of the next several places from one hidden state (Cai et al., arXiv 2401.10774).

Checkpoints have vLLM's names: ``blocks.{i}.layers.0.{weight,bias}``, a residual block for each head, then output
layers ``lm_heads.{i}.weight`` or one ``lm_head.weight`` for all. These may be of some tokens only, whose ids are
``token_map``.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file

from ...cluster.errors import ConfigError, ModelLoadError
from ..layers.linear import Linear
from .decoder import Decoder
from .draft_head import head_method


@dataclass(frozen=True, slots=True)
class MedusaHeads:
    """Head i guesses the token i + 1 places behind the one that was sampled from the hidden state it reads."""

    blocks: Linear
    """[hidden] -> [num_heads * hidden], all heads' in one product."""
    outputs: tuple[Linear, ...]
    """Of each head, or one of all: [hidden] -> [W]."""
    num_heads: int
    token_map: torch.Tensor | None
    """[W] int64; None where W is the whole vocabulary."""

    @torch.inference_mode()
    def guesses(self, hidden: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """For states [S, hidden] behind the final norm: the ``count`` likeliest tokens of each head.

        Token ids and their log-probabilities, [S, num_heads, count], the likeliest first.
        """
        changes = self.blocks.apply(hidden).unflatten(1, (self.num_heads, -1))
        states = hidden[:, None] + F.silu(changes)  # [S, num_heads, hidden]
        if len(self.outputs) == 1:
            logits = self.outputs[0].apply(states.flatten(0, 1)).unflatten(0, states.shape[:2])
        else:
            heads = zip(self.outputs, states.unbind(1), strict=True)
            logits = torch.stack([output.apply(state.contiguous()) for output, state in heads], 1)
        logits = logits.float()
        values, places = logits.topk(min(count, logits.shape[-1]))
        token_ids = places if self.token_map is None else self.token_map[places]
        return token_ids, values - logits.logsumexp(-1, keepdim=True)


def load_heads(folder: Path, decoder: Decoder) -> MedusaHeads:
    """The heads that were trained for a model. Raises ModelLoadError, and ConfigError for those of another model."""
    config, tensors = _read(folder)
    spec, num_heads = decoder.spec, int(config.get("num_heads", 0))
    trained_for = (config.get("hidden_size"), config.get("vocab_size"))
    if trained_for != (spec.hidden_size, spec.vocab_size):
        raise ConfigError(
            f"speculative_config: {folder} has heads for a model with hidden_size {trained_for[0]} and vocab_size"
            f" {trained_for[1]}; this one's are {spec.hidden_size} and {spec.vocab_size}",
            param="speculative_config",
        )
    taken = _Tensors(folder, tensors)
    size, width = spec.hidden_size, int(config.get("truncated_vocab_size") or spec.vocab_size)
    blocks = [f"blocks.{index}.layers.0" for index in range(num_heads)]
    outputs = [f"lm_heads.{index}" for index in range(num_heads)]
    if config.get("original_lm_head", False):
        outputs = ["lm_head"]
    method = head_method(decoder, size)
    return MedusaHeads(
        method.prepare(
            torch.cat([taken(f"{name}.weight", size, size) for name in blocks]),
            torch.cat([taken(f"{name}.bias", size) for name in blocks]),
        ),
        tuple(method.prepare(taken(f"{name}.weight", width, size), None) for name in outputs),
        num_heads,
        taken("token_map", width).long().to(decoder.device) if width < spec.vocab_size else None,
    )


@dataclass(frozen=True, slots=True)
class _Tensors:
    folder: Path
    tensors: dict[str, torch.Tensor]

    def __call__(self, name: str, *shape: int) -> torch.Tensor:
        found = self.tensors.get(name)
        if found is None or found.shape != shape:
            what = "is missing" if found is None else f"has shape {list(found.shape)}"
            raise ModelLoadError(f"{self.folder}: tensor {name} {what}, expected {list(shape)}")
        return found


def _read(folder: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    try:
        config = json.loads((folder / "config.json").read_text())
        tensors = load_file(folder / "model.safetensors")
    except (OSError, ValueError, SafetensorError) as error:
        raise ModelLoadError(f"{folder}: no heads in config.json and model.safetensors: {error}") from error
    if config.get("model_type") != "medusa" or config.get("num_hidden_layers") != 1 or not config.get("num_heads"):
        raise ModelLoadError(
            f"{folder}/config.json: expected model_type medusa, num_hidden_layers 1 and num_heads of at least 1"
        )
    return config, tensors
