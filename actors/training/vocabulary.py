"""The part of the vocabulary that drafts are made of.

A few thousand tokens make up nearly all of what a model writes, and a head over them alone is read and multiplied in a
fraction of the time (Zhao et al., "FR-Spec", arXiv 2502.14856). What drafts leave out the model still says itself.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .corpus import Text


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
