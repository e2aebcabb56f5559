"""How tokens meet their experts: where they are, or by all-to-all between the ranks of the expert parallel group.

What goes over the wire is fixed by ``cluster/step_traffic.py``, which foretells its bytes.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch

from ...cluster.splits import split_evenly
from ..parallel.collectives import Collectives
from .moe_experts import RankExperts, weighted_sum


class Dispatch(Protocol):
    """Brings tokens to their experts and the results back."""

    @property
    def first_turn(self) -> int:
        """Where the rank's tokens begin their round over the copies of an expert."""
        ...

    def share(self, num_tokens: int) -> slice:
        """The tokens, of those that the rank's tp group has, that the rank looks after."""
        ...

    def start(
        self, experts: RankExperts, x: torch.Tensor, copies: torch.Tensor, weights: torch.Tensor
    ) -> Callable[[], torch.Tensor]:
        """Begin with tokens as ``RankExperts`` takes them. What is returned is called once, for [T, hidden].

        Work of the rank's own between the two calls hides the wire.
        """
        ...


class LocalDispatch:
    """Every rank sees all tokens (ep <= tp) and adds up its own experts' outputs; the tp group sums over ranks."""

    first_turn = 0
    """The same on all ranks: they must agree on a token's copy without a word."""

    def share(self, num_tokens: int) -> slice:
        """All of them."""
        return slice(0, num_tokens)

    def start(
        self, experts: RankExperts, x: torch.Tensor, copies: torch.Tensor, weights: torch.Tensor
    ) -> Callable[[], torch.Tensor]:
        """Nothing has to move."""
        return partial(experts, x, copies, weights)


class TokenExchange:
    """Attention is data-parallel (ep > tp): tokens go to their experts' ranks and the results come back.

    A token goes once to each rank that has some of its experts, and comes back as one row, weighted and summed. All
    ranks of ``ep`` take part in every exchange, those without tokens too. The ranks of a tp group share its tokens:
    they see the same ones, and each sends its part.
    """

    def __init__(self, ep: Collectives, *, tp: int = 1) -> None:
        self._ep = ep
        self._tp = tp

    @property
    def first_turn(self) -> int:
        """Ranks begin with different copies, so that small batches do not all go to the first."""
        return self._ep.rank

    def share(self, num_tokens: int) -> slice:
        """An even part; ep ranks count through the tp groups."""
        part = split_evenly(num_tokens, self._tp)[self._ep.rank % self._tp]
        return slice(part.start, part.stop)

    def start(
        self, experts: RankExperts, x: torch.Tensor, copies: torch.Tensor, weights: torch.Tensor
    ) -> Callable[[], torch.Tensor]:
        """Counts first, then the rows, which are under way on return."""
        route = _Route.of(copies // len(experts.mlps), self._ep.size)
        received = self._ep.exchange_counts(route.counts)
        wire = _Wire(x.dtype, copies.shape[1])
        sent = wire.pack(x, copies, weights).index_select(0, route.tokens)
        arrived = sent.new_empty(sum(received), sent.shape[1])
        pending = self._ep.all_to_all(sent, route.counts, arrived, received)

        def finish() -> torch.Tensor:
            pending.wait()
            answers = experts(*wire.unpack(arrived))
            rows = answers.new_empty(len(sent), x.shape[1])
            self._ep.all_to_all(answers, received, rows, route.counts).wait()
            return weighted_sum(rows, route.places, route.is_first).to(x.dtype)

        return finish


@dataclass(frozen=True, slots=True)
class _Route:
    """Which tokens go to which ranks of the group: R rows, by rank and then by token."""

    counts: list[int]
    """[ranks] rows for each."""
    tokens: torch.Tensor
    """[R] the token of each row."""
    places: torch.Tensor
    """[T, k] the row of the rank that each choice is on."""
    is_first: torch.Tensor
    """[T, k] float32: 1 for a token's first choice on a rank, whose row holds the others there too, else 0."""

    @classmethod
    def of(cls, ranks: torch.Tensor, size: int) -> "_Route":
        """``ranks`` [T, k]: where each choice is."""
        reached = torch.zeros(size, len(ranks), dtype=torch.bool, device=ranks.device).scatter_(0, ranks.t(), True)
        row = reached.flatten().cumsum(0).view_as(reached) - 1
        repeats = (ranks[:, :, None] == ranks[:, None, :]).tril(-1).any(-1)
        return cls(reached.sum(1).tolist(), reached.nonzero()[:, 1], row.t().gather(1, ranks), (~repeats).float())


@dataclass(frozen=True, slots=True)
class _Wire:
    """A token as bytes: its copies' numbers (int32) and weights (float32), then its hidden state."""

    dtype: torch.dtype
    num_choices: int

    def pack(self, x: torch.Tensor, copies: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """[T, bytes] uint8."""
        parts = (copies.to(torch.int32), weights.contiguous(), x.contiguous())
        return torch.cat([part.view(torch.uint8) for part in parts], 1)

    def unpack(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """What ``pack`` took: [T, hidden], [T, k], [T, k]."""
        split = 4 * self.num_choices
        copies, weights, x = (part.contiguous() for part in rows.tensor_split((split, 2 * split), 1))
        return x.view(self.dtype), copies.view(torch.int32).long(), weights.view(torch.float32)
