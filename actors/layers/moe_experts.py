"""The experts of one rank: tokens sorted by expert, one MLP for each that has work."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .mlp import GatedMLP


@dataclass(slots=True)
class ExpertWork:
    """What a rank's experts have done."""

    num_rows: int = 0
    """A token has one for each of its experts."""


@dataclass(frozen=True, slots=True)
class RankExperts:
    """The MLPs in a rank's slots, in whatever form their linears are.

    Experts go by the number of their copy (see ``ExpertPlacement``); the rank holds ``len(mlps)`` of all
    ``num_copies``, from ``first_copy`` on. With parts of experts (``expert_tp``) all results are parts of sums.
    """

    mlps: Sequence[GatedMLP]
    first_copy: int
    num_copies: int
    work: ExpertWork

    def __call__(self, x: torch.Tensor, copies: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Tokens [T, hidden], chosen copies [T, k] int64, weights [T, k] float32 -> [T, hidden] in x's dtype.

        A token's row is the weighted sum over those of its copies that are here, zeros if there are none. It is added
        up in float32 and in the order of the choices, so that it does not depend on the other tokens.
        """
        flat, num_choices = copies.flatten(), copies.shape[1]
        counts = flat.bincount(minlength=self.num_copies).tolist()
        begin, last = sum(counts[: self.first_copy]), self.first_copy + len(self.mlps)
        sizes = counts[self.first_copy : last]
        num_rows = sum(sizes)
        self.work.num_rows += num_rows
        work = flat.argsort(stable=True)[begin : begin + num_rows]
        out = x.new_empty(num_rows + 1, x.shape[1])
        out[num_rows] = 0  # stands for every choice that another rank computes
        self._apply(x.index_select(0, work // num_choices), sizes, out)
        places = torch.full_like(flat, num_rows)
        places[work] = torch.arange(num_rows, device=x.device)
        return weighted_sum(out, places.view_as(copies), weights).to(x.dtype)

    def _apply(self, rows: torch.Tensor, sizes: Sequence[int], out: torch.Tensor) -> None:
        """``rows`` are sorted by slot, ``sizes`` of them for each; their outputs go into ``out``."""
        begin = 0
        for mlp, size in zip(self.mlps, sizes, strict=True):
            if size:
                out[begin : begin + size] = mlp(rows[begin : begin + size])
                begin += size


def weighted_sum(rows: torch.Tensor, places: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """[T, ...] float32: for each token the sum over j of rows[places[t, j]] * weights[t, j], in the order of j."""
    total = torch.zeros(len(places), rows.shape[1], device=rows.device)
    for place, weight in zip(places.t(), weights.t(), strict=True):
        total.addcmul_(rows.index_select(0, place), weight[:, None])
    return total
