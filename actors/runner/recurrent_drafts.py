"""Drafting by a recurrent head: a tree of guesses that grows, pass by pass, where it is likeliest to stand."""

from collections.abc import Sequence
from math import exp, log

import torch

from ...cluster.ids import RequestId
from ..engine.draft_tree import ROOT, Draft
from ..engine.plan import StepPlan
from ..models.recurrent_head import RecurrentHead
from .arrays import to_device
from .sequences import SequenceTable

WIDTHS = (3, 3, 3, 3)
"""Most guesses behind the last token, behind each of these, and so on, by default."""
_LEAST_GROWN = log(0.15)
"""A pass of the head takes a twentieth of a step: nodes less likely than this bring less behind them."""


class RecurrentDrafter:
    """Implements ``Drafts`` and ``HiddenReader``. Nothing is kept of a sequence between steps."""

    def __init__(self, head: RecurrentHead, widths: Sequence[int]) -> None:
        """``widths``: most guesses behind the last token, behind each of these, and so on."""
        self._head = head
        self._widths = widths
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
        steps = [sampling[row] for row in rows]
        states = [table[step.request_id] for step in steps]
        last = table.tokens.cells[[state.row for state in states], [state.num_tokens - 1 for state in states]]
        trees = [GrowingTree(step.num_drafts) for step in steps]
        self._grow(trees, self._take(self._hidden, rows), last.tolist())
        return {step.request_id: tree.best(plan.least_probability) for step, tree in zip(steps, trees, strict=True)}

    def _grow(self, trees: Sequence["GrowingTree"], states: torch.Tensor, came: list[int]) -> None:
        """From the states [B, hidden] and the token that came behind each; a pass for each depth."""
        tips = [(tree, ROOT) for tree in trees]
        for width in self._widths:
            read = to_device(came, torch.int64, states.device)
            states, found, scores = self._head.guess(states, read, width)
            for (tree, node), token_ids, logprobs in zip(tips, found.tolist(), scores.tolist(), strict=True):
                tree.grow(node, token_ids, logprobs)
            parents = {(id(tree), node): row for row, (tree, node) in enumerate(tips)}
            tips = [(tree, node) for tree in trees for node in tree.tips()]
            if not tips:
                return
            came = [tree.token_ids[node] for tree, node in tips]
            states = self._take(states, [parents[id(tree), tree.parents[node]] for tree, node in tips])

    def _take(self, states: torch.Tensor, rows: list[int]) -> torch.Tensor:
        return states[to_device(rows, torch.int64, states.device)]


class GrowingTree:
    """Guesses in the order that they are made in, each with the probability of its branch."""

    def __init__(self, most: int) -> None:
        """``most`` nodes are wanted of it."""
        self._most = most
        self.token_ids: list[int] = []
        self.parents: list[int] = []
        self._scores: list[float] = []
        """Sums of log-probabilities from the root down."""
        self._depth_start = 0

    def grow(self, node: int, token_ids: Sequence[int], logprobs: Sequence[float]) -> None:
        """Guesses behind a node."""
        base = 0.0 if node == ROOT else self._scores[node]
        self.token_ids += token_ids
        self.parents += [node] * len(token_ids)
        self._scores += [base + logprob for logprob in logprobs]

    def tips(self) -> list[int]:
        """Of the nodes since the last call, those that more should grow behind."""
        start, self._depth_start = self._depth_start, len(self.token_ids)
        kept = self._order()[: self._most - 1]  # the last of all has no room behind it
        return [node for node in kept if node >= start and self._scores[node] >= _LEAST_GROWN]

    def best(self, least: float) -> Draft:
        """The likeliest nodes in that order, none below the probability ``least``: each behind its parent."""
        kept = [node for node in self._order()[: self._most] if exp(self._scores[node]) >= least]
        place = {node: index for index, node in enumerate(kept)} | {ROOT: ROOT}
        parents = tuple(place[self.parents[node]] for node in kept)
        is_chain = parents == tuple(range(ROOT, len(kept) - 1))
        return Draft(tuple(self.token_ids[node] for node in kept), () if is_chain else parents)

    def _order(self) -> list[int]:
        return sorted(range(len(self._scores)), key=lambda node: (-self._scores[node], node))
