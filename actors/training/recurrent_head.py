"""A head that reads the tokens which it guesses (after Cheng et al., "Recurrent Drafter", arXiv 2403.09919).

Medusa's heads know the hidden state alone: the second must guess without knowing what the first has guessed. Here one
small network takes a state and the token that came, and gives the state from which the next one is guessed; so it runs
for one token after the other.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from ..models.recurrent_head import MODEL_TYPE
from .checkpoint import write_folder
from .corpus import Text
from .features import Features
from .targets import Targets
from .vocabulary import Vocabulary

_FADING = 0.8
"""Weight of each place's loss, times that of the one before."""
_ROWS = 512


class RecurrentHead(nn.Module):
    """s' = s + down(SiLU(up([norm(s), norm(e)]))), e being the model's embedding of the token; logits are of s'."""

    def __init__(self, head: torch.Tensor, embedding: torch.Tensor, inner_size: int) -> None:
        """``head`` [W, hidden]: the model's own rows of the tokens that are guessed; ``embedding`` [vocab, hidden]."""
        super().__init__()
        hidden_size = head.shape[1]
        self.up = nn.Linear(2 * hidden_size, inner_size, bias=False)
        self.down = nn.Linear(inner_size, hidden_size, bias=False)
        nn.init.zeros_(self.down.weight)  # it starts as the model's own head
        self.lm_head = nn.Linear(hidden_size, len(head), bias=False)
        self.lm_head.weight = nn.Parameter(head.float().clone())
        self._embedding = embedding

    def forward(self, state: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
        """[R, hidden] and the tokens [R] that came -> [R, hidden]."""
        size = state.shape[1:]
        read = torch.cat((F.rms_norm(state, size), F.rms_norm(self._embedding[token_ids].float(), size)), 1)
        return state + self.down(F.silu(self.up(read)))


@dataclass(frozen=True, slots=True)
class RecurrentTask:
    """What it learns: ``num_places`` of the model's distributions behind each place, along the text."""

    head: RecurrentHead
    features: Features
    following: torch.Tensor
    """[N] int64: the token behind each row."""
    vocabulary: Vocabulary
    num_places: int

    @classmethod
    def of(
        cls, head: RecurrentHead, texts: Sequence[Text], features: Features, vocabulary: Vocabulary, num_places: int
    ) -> "RecurrentTask":
        """``features`` are those of the texts."""
        following = [token_id for text in texts for token_id in [*text.token_ids[max(1, text.start) :], 0]]
        return cls(head, features, torch.tensor(following), vocabulary, num_places)

    @property
    def num_examples(self) -> int:
        """Places."""
        return len(self.features.hidden)

    def loss(self, rows: torch.Tensor) -> torch.Tensor:
        """Of some places."""
        losses = [
            _FADING**place * targets.loss(self.head.lm_head(state))
            for place, (state, targets) in enumerate(self._places(rows))
        ]
        return torch.stack(losses).sum() / sum(_FADING**place for place in range(len(losses)))

    def _places(self, rows: torch.Tensor) -> list[tuple[torch.Tensor, Targets]]:
        """The states that places are guessed from, and what should be guessed; fewer rows where texts end."""
        state = self.features.hidden[rows].float()
        found: list[tuple[torch.Tensor, Targets]] = []
        for place in range(self.num_places):
            has = self.features.left[rows] > place
            rows, state = rows[has], state[has]
            state = self.head(state, self.following[rows + place])
            found.append((state, Targets.of(self.features, rows + place + 1, self.vocabulary)))
        return found

    @torch.inference_mode()
    def accuracy(self) -> dict[str, Any]:
        """How good guesses are along texts that it has not seen.

        ``accepted``: share of places at which all guesses up to this one are what the model finds likeliest there;
        ``sampled``: how often each would stand, behind those before it, if it were drawn at temperature 1.
        """
        rows = torch.nonzero(self.features.left >= self.num_places).flatten()
        agrees: list[torch.Tensor] = []
        overlaps: list[torch.Tensor] = []
        for part in rows.split(_ROWS):
            places = [targets.agreement(self.head.lm_head(state)) for state, targets in self._places(part)]
            agrees.append(torch.stack([agreed for agreed, _ in places], 1))
            overlaps.append(torch.stack([overlap for _, overlap in places], 1))
        accepted = torch.cat(agrees).int().cumprod(1).float().mean(0).tolist()
        return {
            "accepted": accepted,
            "sampled": torch.cat(overlaps).mean(0).tolist(),
            "tokens_per_step": 1 + sum(accepted),
        }


def write_recurrent_head(folder: Path, head: RecurrentHead, vocabulary: Vocabulary) -> None:
    """config.json and model.safetensors, in float16."""
    inner_size, double = head.up.weight.shape
    config = {
        "model_type": MODEL_TYPE,
        "hidden_size": double // 2,
        "inner_size": inner_size,
        "vocab_size": len(vocabulary.places),
        "truncated_vocab_size": vocabulary.size,
    }
    tensors = {**head.state_dict(), "token_map": vocabulary.token_map}
    write_folder(folder, config, {"model.safetensors": tensors})
