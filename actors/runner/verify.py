"""Which drafted tokens stand: exact sampling, several tokens at a time.

A step gives logits for a sequence's last token and for every token drafted behind it. For each place a token is chosen
as if the draft up to there had been sampled before; drafts stand as long as they are what was chosen, and the first
choice that differs (or follows the whole draft) is the step's last token. So a row that is chosen as it would be
without drafts makes speculation invisible: greedily, and with the draw of the same seed and index. Drafts that are
certain (no distribution behind them) are accepted with their own probability that way, which is all that can be had.

Drafts drawn from a distribution q are accepted more often by a test: keep the draft with probability min(1, p/q), else
draw from the normalised (p - q)+, which never gives the draft (Leviathan et al., arXiv 2211.17192; Chen et al., arXiv
2302.01318). The choice is distributed as p all the same. Tests and draws are by counters (see ``draw``), and a place
that is drafted again after another prefix may use its numbers again: no earlier decision depended on them.

In a tree each node is a row that is chosen as if its branch had been sampled; from the root on, what is chosen at a
node is looked for among its children. All nodes of one depth draw with the number of that place, and only the one on
the path counts. Guesses of a tree are certain, so there is no test that would accept more.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import sqrt

import numpy as np
import torch

from ..engine.draft_tree import ROOT, Draft
from .arrays import Int32s, to_device
from .choice import Choice, draw_weights
from .draw import Stream, draw, uniform
from .rows import SamplingRow
from .sequences import SequenceState


@dataclass(frozen=True, slots=True)
class DraftedRow(SamplingRow):
    """A row of logits, and the token that was drafted for it; None behind the whole draft."""

    draft: int | None = None
    weights: torch.Tensor | None = None
    """q [vocab] that the draft was drawn from; None where it was certain, or drawn by the numbers used here."""


def drafted_rows(
    state: SequenceState, draft: Draft, history: Callable[[SequenceState, int], Int32s]
) -> list[DraftedRow]:
    """One for the last known token, and one for each node."""
    if draft.parents:
        return _tree_rows(state, draft, history(state, 0))
    token_ids = draft.token_ids
    weights = [None] * len(draft) if state.draft_weights is None else state.draft_weights
    return [
        DraftedRow(
            params=state.params,
            seed=state.seed,
            num_prompt=state.num_prompt,
            token_ids=history(state, place),
            guide=state.guide,
            draft=token_ids[place] if place < len(draft) else None,
            weights=weights[place] if place < len(draft) else None,
        )
        for place in range(len(draft) + 1)
    ]


def _tree_rows(state: SequenceState, draft: Draft, known: Int32s) -> list[DraftedRow]:
    """Each node's history is its branch; of its children the first is the one that may be typical."""
    first_children = dict(reversed([*zip(draft.parents, draft.token_ids, strict=True)]))
    return [
        DraftedRow(
            params=state.params,
            seed=state.seed,
            num_prompt=state.num_prompt,
            token_ids=np.concatenate((known, np.array(draft.branch(node), np.int32))),
            guide=state.guide,
            draft=first_children.get(node),
        )
        for node in range(ROOT, len(draft))
    ]


class VerifyingChoice:
    """A ``Choice`` for rows with drafts."""

    def __init__(self, choice: Choice, threshold: float | None = None) -> None:
        """``choice`` takes the rows without a test. With a ``threshold``, drafts that are typical stand as well: lossy.

        Typical is a probability of at least min(threshold, sqrt(threshold) · exp(-entropy)), as in Medusa (Cai et al.,
        arXiv 2401.10774).
        """
        self._choice = choice
        self._threshold = threshold

    def likeliest(self, logits: torch.Tensor) -> torch.Tensor:
        """See ``Choice.likeliest``."""
        return self._choice.likeliest(logits)

    def choose(self, logits: torch.Tensor, rows: Sequence[SamplingRow]) -> torch.Tensor:
        """See ``Choice.choose``."""
        tested = {index: row for index, row in enumerate(rows) if isinstance(row, DraftedRow) and self._tests(row)}
        if not tested:
            return self._choice.choose(logits, rows)
        where, drafted = to_device([*tested], torch.int64, logits.device), [*tested.values()]
        weights = draw_weights(logits[where], drafted)
        token_ids = self._choice.choose(logits, rows)
        token_ids[where] = self._test(weights.div_(weights.sum(1, keepdim=True)), drafted, token_ids[where])
        return token_ids

    def _tests(self, row: DraftedRow) -> bool:
        is_drawn = row.draft is not None and not row.params.greedy
        return is_drawn and (row.weights is not None or self._threshold is not None)

    def _test(self, p: torch.Tensor, rows: Sequence[DraftedRow], chosen: torch.Tensor) -> torch.Tensor:
        """The draft, or another token; p is [R, vocab]."""
        device = p.device
        drafts = to_device([row.draft or 0 for row in rows], torch.int64, device)[:, None]
        stands = torch.zeros(len(rows), dtype=torch.bool, device=device)
        others = chosen.clone()
        drawn = [index for index, row in enumerate(rows) if row.weights is not None]
        if drawn:
            where = to_device(drawn, torch.int64, device)
            q = torch.stack([weights for row in rows if (weights := row.weights) is not None])
            stands[where], others[where] = _rejection(p[where], q, drafts[where], [rows[index] for index in drawn])
        if self._threshold is not None:
            stands |= _typical(p, drafts, self._threshold)
        return torch.where(stands, drafts.flatten(), others)


def _rejection(
    p: torch.Tensor, q: torch.Tensor, drafts: torch.Tensor, rows: Sequence[SamplingRow]
) -> tuple[torch.Tensor, torch.Tensor]:
    """(whether each draft [R, 1] stands, what is drawn where it does not)."""
    tests, draws = (
        to_device([uniform(row.seed, row.num_output, stream) for row in rows], torch.float64, p.device)
        for stream in (Stream.TEST, Stream.TOKEN)
    )
    stands = tests * q.gather(1, drafts).flatten() < p.gather(1, drafts).flatten()
    rest = (p - q).clamp_(min=0.0)
    # Nothing is left only where p and q are equal but for rounding.
    return stands, draw(torch.where(rest.sum(1, keepdim=True) > 0, rest, p), draws)


def _typical(p: torch.Tensor, drafts: torch.Tensor, threshold: float) -> torch.Tensor:
    entropy = -torch.special.xlogy(p, p).sum(1)
    return p.gather(1, drafts).flatten() >= (sqrt(threshold) * (-entropy).exp()).clamp_(max=threshold)
