"""A drafting model that learns from what the model writes."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from ...cluster.model_config_export import config_from_spec
from ...cluster.model_tensors import HEAD
from ..models.draft_head import DRAFT_HEAD, TOKEN_MAP
from ..models.spec import read_spec
from ..models.tensors import wanted_tensors
from ..models.weights import Weights
from .checkpoint import write_folder
from .corpus import Text
from .draft_net import DraftNet, LayerChoice
from .features import Features
from .model_parts import head_rows, weight_source
from .targets import Targets
from .vocabulary import Vocabulary

_PLACES = 8
"""Guesses in a row that are measured."""


def start_draft(path: Path, layers: LayerChoice, vocabulary: Vocabulary) -> DraftNet:
    """A net of some of the model's layers, its final norm, and its output rows of the tokens that are guessed."""
    own = replace(
        read_spec(path),
        num_layers=len(layers.layers),
        layer_windows=(None,) * len(layers.layers),
        tie_embeddings=True,
    )
    net = DraftNet(own, head_rows(path, vocabulary.token_map))
    names = wanted_tensors(own)
    weights = Weights(weight_source(path), {layers.names(name): shape for name, shape in names.items()})
    state = {name: weights.take(layers.names(name)).float() for name in names}
    net.load_state_dict({**state, HEAD: net.lm_head.weight.detach()})
    return net


@dataclass(frozen=True, slots=True)
class DraftTask:
    """What a draft learns: at each place the model's distribution."""

    net: DraftNet
    texts: Sequence[Text]
    features: Features
    vocabulary: Vocabulary

    @property
    def num_examples(self) -> int:
        """Texts."""
        return len(self.texts)

    def loss(self, rows: torch.Tensor) -> torch.Tensor:
        """Of some texts."""
        logits, where = self._logits(rows.tolist())
        return Targets.of(self.features, where, self.vocabulary).loss(logits)

    def _logits(self, texts: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """(logits [R, W] of the texts' rows one after the other, those rows [R])."""
        chosen = [self.texts[text] for text in texts]
        longest = max(len(text.token_ids) for text in chosen)
        # What is after a text's end is seen by nothing before it.
        token_ids = torch.tensor([text.token_ids + [0] * (longest - len(text.token_ids)) for text in chosen])
        hidden = self.net(token_ids)
        parts = [
            states[max(0, text.start - 1) : len(text.token_ids)] for states, text in zip(hidden, chosen, strict=True)
        ]
        slices = [self.features.rows(text) for text in texts]
        where = torch.cat([torch.arange(part.start, part.stop) for part in slices])
        return self.net.lm_head(torch.cat(parts)), where


@torch.inference_mode()
def draft_acceptance(task: DraftTask) -> dict[str, Any]:
    """How good a draft is on texts that it has not seen, along the model's own text.

    ``greedy``: share of places at which its likeliest token is the model's; ``sampled``: how often a token drawn from
    it would stand at temperature 1; ``accepted``: share of places behind which it is right 1, 2 … times in a row.
    """
    stands: list[torch.Tensor] = []
    sampled: list[torch.Tensor] = []
    for text in range(task.num_examples):
        logits, where = task._logits([text])
        agrees, overlap = Targets.of(task.features, where, task.vocabulary).agreement(logits)
        stands.append(_runs(agrees))
        sampled.append(overlap)
    runs = torch.cat(stands)
    accepted = [float((runs >= place).float().mean()) for place in range(1, _PLACES + 1)]
    return {"greedy": accepted[0], "sampled": float(torch.cat(sampled).mean()), "accepted": accepted}


def _runs(agrees: torch.Tensor) -> torch.Tensor:
    """[R] bool -> how many are true from each on."""
    runs = torch.zeros(len(agrees), dtype=torch.int64)
    length = 0
    for index in range(len(agrees) - 1, -1, -1):
        length = length + 1 if agrees[index] else 0
        runs[index] = length
    return runs


def write_draft(folder: Path, net: DraftNet, vocabulary: Vocabulary) -> None:
    """A Hugging Face folder.

    A head over the whole vocabulary is an ordinary one. A reduced one is a file of its own, ``draft_head.safetensors``,
    beside a model that uses its embedding as its head: so it is a whole model too for readers that do not know of it.
    """
    is_reduced = vocabulary.size < net.spec.vocab_size
    tensors = dict(net.state_dict())
    files = {"model.safetensors": tensors}
    if is_reduced:
        files[DRAFT_HEAD] = {HEAD: tensors.pop(HEAD), TOKEN_MAP: vocabulary.token_map}
    write_folder(folder, config_from_spec(replace(net.spec, tie_embeddings=is_reduced)), files)
