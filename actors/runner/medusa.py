"""Drafting by Medusa heads: after a step, one pass of all heads over the hidden states that its tokens came from."""

from collections.abc import Sequence
from typing import TypeVar

import torch

from ...cluster.ids import RequestId
from ..engine.draft_tree import Draft
from ..engine.plan import StepPlan
from ..models.medusa import MedusaHeads
from .arrays import to_device
from .sequences import SequenceTable
from .tree import best_tree

_T = TypeVar("_T")
WIDTH = 10
"""Guesses of each head that a tree is made of, by default."""


class MedusaDrafter:
    """Implements ``Drafts`` and ``HiddenReader``. Nothing is kept of a sequence between steps."""

    def __init__(self, heads: MedusaHeads, widths: Sequence[int]) -> None:
        """``widths``: most guesses of the first head, the second …; heads beyond them are not asked for any."""
        self._heads = heads
        self._widths = widths[: heads.num_heads]
        self._hidden: torch.Tensor | None = None

    def begin(self, table: SequenceTable, plan: StepPlan) -> None:
        """See ``Drafts``."""
        self._hidden = None

    def read(self, hidden: torch.Tensor) -> None:
        """See ``HiddenReader``."""
        self._hidden = hidden

    def draft(self, table: SequenceTable, plan: StepPlan) -> dict[RequestId, Draft]:
        """See ``Drafts``."""
        sampling = [step for step in plan.sequences if step.samples]
        rows = [row for row, step in enumerate(sampling) if step.num_drafts]
        if self._hidden is None or not rows:
            return {}
        hidden = self._hidden[to_device(rows, torch.int64, self._hidden.device)]
        found, scores = self._heads.guesses(hidden, max(self._widths))
        drafts: dict[RequestId, Draft] = {}
        for row, token_ids, logprobs in zip(rows, found.tolist(), scores.tolist(), strict=True):
            step, own, scores_of = sampling[row], self._cut(token_ids), self._cut(logprobs)
            drafts[step.request_id] = best_tree(own, scores_of, step.num_drafts, plan.least_probability)
        return drafts

    def _cut(self, guesses: list[list[_T]]) -> list[list[_T]]:
        return [own[:width] for own, width in zip(guesses, self._widths, strict=False)]
