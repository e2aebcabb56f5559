"""The part of the vocabulary that drafts are made of.

A few thousand tokens make up nearly all of what a model writes, and a head over them alone is read and multiplied in a
fraction of the time (Zhao et al., "FR-Spec", arXiv 2502.14856). What drafts leave out the model still says itself.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .corpus import Text
from .features import Features


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """W of the model's tokens."""

    token_map: torch.Tensor
    """[W] int64: the model's ids, ascending."""
    places: torch.Tensor
    """[vocab] int64: place in ``token_map``, or -1."""

    @classmethod
    def most_frequent(cls, texts: Sequence[Text], vocab_size: int, size: int, always: Sequence[int]) -> "Vocabulary":
        """The ``size`` tokens written most often; ``always`` are among them."""
        written = torch.tensor([token_id for text in texts for token_id in text.token_ids[text.start :]])
        counts = written.bincount(minlength=vocab_size)[:vocab_size]
        counts[list(always)] = counts.max() + 1
        token_map = counts.topk(min(size, vocab_size)).indices.sort().values
        places = torch.full((vocab_size,), -1)
        places[token_map] = torch.arange(len(token_map))
        return cls(token_map, places)

    @property
    def size(self) -> int:
        """W."""
        return len(self.token_map)

    def coverage(self, texts: Sequence[Text]) -> float:
        """Share of what was written that it has."""
        written = torch.tensor([token_id for text in texts for token_id in text.token_ids[text.start :]])
        return float((self.places[written] >= 0).float().mean())


@dataclass(frozen=True, slots=True)
class Targets:
    """What the model says of some places: tokens of the reduced vocabulary and their probabilities."""

    places: torch.Tensor
    """[R, TOP] int64, -1 for tokens that it lacks."""
    probs: torch.Tensor
    """[R, TOP] float32."""

    @classmethod
    def of(cls, features: Features, rows: torch.Tensor | slice, vocabulary: Vocabulary) -> "Targets":
        """Of some rows."""
        return cls(vocabulary.places[features.top_ids[rows].long()], features.top_probs[rows].float())

    def loss(self, logits: torch.Tensor) -> torch.Tensor:
        """Cross-entropy of logits [R, W] with the model's distribution, in nats, the mean of all rows.

        Mass of tokens that are not there asks for nothing.
        """
        probs = self.probs.masked_fill(self.places < 0, 0.0)
        chosen = logits.gather(1, self.places.clamp(min=0))
        return ((logits.logsumexp(1, keepdim=True) - chosen) * probs).sum() / max(1, len(logits))

    def agreement(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """For each row: is the likeliest token the model's ([R] bool), and how often would a drawn one stand ([R])."""
        q = logits.softmax(1).gather(1, self.places.clamp(min=0)).masked_fill(self.places < 0, 0.0)
        return logits.argmax(1) == self.places[:, 0], torch.minimum(self.probs, q).sum(1)
