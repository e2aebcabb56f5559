"""Heads that guess several tokens ahead from one hidden state (Cai et al., "Medusa", arXiv 2401.10774)."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from .checkpoint import write_folder
from .features import Features
from .targets import Targets
from .vocabulary import Vocabulary

_FADING = 0.8
"""Weight of each head's loss, times that of the one before: later guesses are asked for less often."""


class _Block(nn.Module):
    """x + SiLU(Wx + b); it starts as x, so that a head starts as the model's own."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(hidden_size, hidden_size)])
        for layer in self.layers:
            for parameter in layer.parameters():
                nn.init.zeros_(parameter)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[R, hidden] -> [R, hidden]."""
        for layer in self.layers:
            x = x + F.silu(layer(x))
        return x


class MedusaHeads(nn.Module):
    """``num_heads`` blocks and one output layer that they share. Parameters have the names of vLLM's checkpoints."""

    def __init__(self, head: torch.Tensor, num_heads: int) -> None:
        """``head`` [W, hidden] are the model's own rows of the tokens that are guessed."""
        super().__init__()
        self.blocks = nn.ModuleList([_Block(head.shape[1]) for _ in range(num_heads)])
        self.lm_head = nn.Linear(head.shape[1], head.shape[0], bias=False)
        self.lm_head.weight = nn.Parameter(head.float().clone())

    def forward(self, hidden: torch.Tensor, head: int) -> torch.Tensor:
        """[R, hidden] -> logits [R, W] of the tokens ``head + 2`` places on."""
        return self.lm_head(self.blocks[head](hidden))


@dataclass(frozen=True, slots=True)
class MedusaTask:
    """What heads learn: at each place the model's distributions of the places that follow."""

    heads: MedusaHeads
    features: Features
    vocabulary: Vocabulary

    @property
    def num_examples(self) -> int:
        """Places."""
        return len(self.features.hidden)

    def loss(self, rows: torch.Tensor) -> torch.Tensor:
        """Of some places."""
        hidden, left = self.features.hidden[rows].float(), self.features.left[rows]
        losses: list[torch.Tensor] = []
        for index in range(len(self.heads.blocks)):
            has = left > index
            targets = Targets.of(self.features, rows[has] + index + 1, self.vocabulary)
            losses.append(_FADING**index * targets.loss(self.heads(hidden[has], index)))
        return torch.stack(losses).sum() / sum(_FADING**index for index in range(len(losses)))


@torch.inference_mode()
def head_accuracy(task: MedusaTask, ranks: int = 4) -> dict[str, Any]:
    """How good heads are on texts that they have not seen.

    ``accepted``: share of places at which all guesses up to this one are what the model finds likeliest there;
    ``by_rank``: for each head the share at which that is its first, second … guess.
    """
    features, num_heads = task.features, len(task.heads.blocks)
    rows = torch.nonzero(features.left >= num_heads).flatten()
    stands = torch.ones(len(rows), dtype=torch.bool)
    accepted: list[float] = []
    by_rank: list[list[float]] = []
    for index in range(num_heads):
        hits = torch.cat([_hits(task, part, index, ranks) for part in rows.split(512)])
        by_rank.append(hits.float().mean(0).tolist())
        stands &= hits[:, 0]
        accepted.append(float(stands.float().mean()))
    return {"accepted": accepted, "by_rank": by_rank, "tokens_per_step": 1 + sum(accepted)}


def _hits(task: MedusaTask, rows: torch.Tensor, index: int, ranks: int) -> torch.Tensor:
    """[R, ranks] bool."""
    guesses = task.heads(task.features.hidden[rows].float(), index).topk(ranks).indices
    wanted = Targets.of(task.features, rows + index + 1, task.vocabulary).places[:, :1]
    return guesses == wanted


def write_heads(folder: Path, heads: MedusaHeads, vocabulary: Vocabulary) -> None:
    """As vLLM reads them: config.json and model.safetensors, in float16."""
    vocab_size, (size, hidden_size) = len(vocabulary.places), heads.lm_head.weight.shape
    config = {
        "model_type": "medusa",
        "architectures": ["MedusaModel"],
        "num_heads": len(heads.blocks),
        "num_hidden_layers": 1,
        "hidden_size": hidden_size,
        "vocab_size": vocab_size,
        "original_lm_head": True,
    }
    tensors = dict(heads.state_dict())
    if size < vocab_size:
        config["truncated_vocab_size"] = size
        tensors["token_map"] = vocabulary.token_map
    write_folder(folder, config, {"model.safetensors": tensors})
