"""What the ranks of a replica send each other in one step.

In every layer attention and MLP end in one all-reduce over the tp group, and OLMoE's norms over all heads need the
sums of their squares; the embedding's all-reduce joins the vocabulary's parts. Stages hand hidden states to the same
place in the next one; logits are gathered where they are sampled. Where attention is data-parallel, rows go to their
experts: each rank takes its share of its tp group's tokens and sends every token once to each rank that has one of
its experts, with the chosen slots and weights; a rank's answer is one row, already weighted and summed.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Literal

from .parallel_layout import ParallelLayout, RankLayout

Operation = Literal["all_reduce", "send", "all_to_all", "gather"]
Purpose = Literal["embedding", "qk_norm", "attention", "mlp", "counts", "dispatch", "combine", "hidden", "logits"]

COUNT_BYTES = 8
"""An int64: rows that follow for a rank."""
CHOICE_BYTES = 8
"""Slot (int32) and weight (float32) of one of a token's experts; a row has room for all of its choices."""
LOGIT_BYTES = 4
"""Logits are gathered as float32."""
SUM_BYTES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """One kind of message of one rank, in one step."""

    purpose: Purpose
    operation: Operation
    group_size: int
    count: int
    """Operations in the step."""
    payload: float
    """Bytes that the rank hands to one of them: the tensor that is reduced, or the rows for other ranks."""

    @property
    def layer_bytes(self) -> float | None:
        """Bytes in each layer that has any; None for what is not of layers."""
        return None if self.purpose in ("embedding", "hidden", "logits") else self.payload

    @property
    def step_bytes(self) -> float:
        """Bytes that the rank hands over in the step."""
        return self.count * self.payload

    @property
    def sent_bytes(self) -> float:
        """Bytes that leave the rank in all of them; an all-reduce as a ring: 2 (n - 1) / n of its tensor."""
        share = 2 * (self.group_size - 1) / self.group_size if self.operation == "all_reduce" else 1
        return self.count * self.payload * share


def dispatch_row_bytes(layout: ParallelLayout, activation_bytes: int) -> int:
    """One token on its way to a rank that has some of its experts."""
    choices = 0 if layout.spec.moe is None else layout.spec.moe.experts_per_token
    return layout.spec.hidden_size * activation_bytes + choices * CHOICE_BYTES


def combine_row_bytes(layout: ParallelLayout, activation_bytes: int) -> int:
    """A rank's answer for one token."""
    return layout.spec.hidden_size * activation_bytes


def exchange_bytes(
    layout: ParallelLayout, rows: Sequence[Sequence[int]], ep_rank: int, activation_bytes: int
) -> dict[Purpose, int]:
    """Bytes that leave a rank in one sparse layer, when rank i sends ``rows[i][j]`` tokens to rank j of the ep group.

    Rows that stay on their rank cost nothing.
    """
    there = sum(rows[ep_rank]) - rows[ep_rank][ep_rank]
    back = sum(sent[ep_rank] for sent in rows) - rows[ep_rank][ep_rank]
    return {
        "counts": (len(rows) - 1) * COUNT_BYTES,
        "dispatch": there * dispatch_row_bytes(layout, activation_bytes),
        "combine": back * combine_row_bytes(layout, activation_bytes),
    }


def expected_reach(layout: ParallelLayout) -> list[float]:
    """By ep_rank: chance that a token has an expert there, if all sets of experts and all copies are equally likely.

    A rank is spared if none of the k chosen experts goes there: the mean over all sets of k of the product of
    (1 - copies there / copies).
    """
    moe, placement = layout.spec.moe, layout.placement
    if moe is None or placement is None:
        return [0.0] * layout.topology.ep
    copies = [len(numbers) for numbers in placement.copies()]
    away = [[1.0 - (expert in held) / count for expert, count in enumerate(copies)] for held in placement.slots]
    return [1.0 - _mean_product(chances, moe.experts_per_token) for chances in away]


def _mean_product(values: Sequence[float], size: int) -> float:
    """Mean, over all subsets of ``size`` values, of their product."""

    def extend(means: list[float], indexed: tuple[int, float]) -> list[float]:
        count, value = indexed
        # Of the subsets of j among count + 1 values, the share j / (count + 1) has the new value.
        return [1.0] + [
            means[j] * (1 - j / (count + 1)) + means[j - 1] * value * j / (count + 1) for j in range(1, size + 1)
        ]

    return reduce(extend, enumerate(values), [1.0] + [0.0] * size)[size]


def step_traffic(
    layout: ParallelLayout, rank: int, *, tokens: int, sampled: int, activation_bytes: int
) -> list[Transfer]:
    """What one rank sends in a step of ``tokens`` tokens, ``sampled`` of which get logits, in its dp group.

    Dispatch and combine are expectations for even routing and as many tokens in the other dp groups; all else is exact.
    """
    own, topology = layout.ranks[rank], layout.topology
    hidden = tokens * layout.spec.hidden_size * activation_bytes
    transfers = _reductions(own, topology.tp, tokens, hidden)
    if topology.exchanges_tokens:
        transfers += _exchanges(layout, own, tokens, activation_bytes)
    if not own.has_head:
        transfers.append(Transfer(purpose="hidden", operation="send", group_size=2, count=1, payload=hidden))
    elif topology.tp > 1 and not own.samples:
        widest = len(layout.ranks[0].cuts["vocab"])  # parts that are narrower by one are filled up
        payload = sampled * widest * LOGIT_BYTES
        transfers.append(
            Transfer(purpose="logits", operation="gather", group_size=topology.tp, count=1, payload=payload)
        )
    return transfers


def _reductions(own: RankLayout, tp: int, tokens: int, hidden: int) -> list[Transfer]:
    if tp == 1:
        return []
    wanted: list[tuple[Purpose, int, int]] = [
        ("embedding", int(own.has_embedding), hidden),
        ("qk_norm", len(own.layers) * own.spec.qk_norm_whole, tokens * 2 * SUM_BYTES),
        ("attention", len(own.layers), hidden),
        ("mlp", len(own.layers), hidden),
    ]
    return [
        Transfer(purpose=purpose, operation="all_reduce", group_size=tp, count=count, payload=payload)
        for purpose, count, payload in wanted
        if count
    ]


def _exchanges(layout: ParallelLayout, own: RankLayout, tokens: int, activation_bytes: int) -> list[Transfer]:
    sparse = sum(map(own.spec.is_sparse, own.layers))
    ep, ep_rank = layout.topology.ep, own.place.ep_rank
    rows, reach = tokens / layout.topology.tp, expected_reach(layout)
    sent, answered = rows * (sum(reach) - reach[ep_rank]), rows * (ep - 1) * reach[ep_rank]
    wanted: tuple[tuple[Purpose, float], ...] = (
        ("counts", (ep - 1) * COUNT_BYTES),
        ("dispatch", sent * dispatch_row_bytes(layout, activation_bytes)),
        ("combine", answered * combine_row_bytes(layout, activation_bytes)),
    )
    return [
        Transfer(purpose=purpose, operation="all_to_all", group_size=ep, count=sparse, payload=payload)
        for purpose, payload in wanted
        if sparse
    ]
