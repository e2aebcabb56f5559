"""Drafting by first layers that ranks share: the rank that samples leads, its tensor-parallel peers follow.

It alone knows where sequences end and what is guessed, so before each pass of the layers it tells its peers what the
pass reads. Where tokens travel to their experts, ranks of other requests take part in as many passes, whether or not
they have anything to draft themselves.
"""

from collections.abc import Sequence

import torch

from ...cluster.ids import RequestId
from ..engine.draft_tree import Draft
from ..engine.plan import StepPlan
from ..runner.draft_layers import LayerSkip
from ..runner.drafting import Drafter
from ..runner.sequences import SequenceState, SequenceTable
from .groups import Groups

_ABSENT = (-1, 0)
"""Instead of (position, token) of a sequence that has no part in a pass."""


class SharedPasses:
    """Passes of the layers, by all ranks that hold parts of them. A pass reads one token of each of its sequences."""

    def __init__(self, layers: LayerSkip, groups: Groups, device: torch.device, *, exchanges_tokens: bool) -> None:
        self._layers = layers
        self._groups = groups
        self._device = device
        self._exchanges_tokens = exchanges_tokens

    def count(self, plan: StepPlan) -> int:
        """Passes after a step, on which all ranks agree: those of the longest draft that anyone is asked for."""
        most = max((step.num_drafts for step in plan.sequences), default=0)
        if not self._exchanges_tokens:
            return most
        return int(self._groups.ep.all_gather(torch.tensor([most], device=self._device)).max())

    def tell(self, rows: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
        """The same rows of (position, token) on all ranks of the group: those of the first. Equally many on each."""
        if self._groups.tp.size == 1 or not rows:
            return list(rows)
        told = self._groups.tp.all_gather(torch.tensor(rows, device=self._device))[0]
        return [(position, token_id) for position, token_id in told.tolist()]

    def run(self, table: SequenceTable, states: list[SequenceState], positions: list[int]) -> torch.Tensor | None:
        """[B, vocab] of what follows each sequence's token at its position; None on ranks that follow."""
        if states:
            return self._layers.run(table, states, positions)
        if self._exchanges_tokens:
            self._run_without_tokens()
        return None

    def idle(self) -> None:
        """The passes after a step in which only ranks of other requests compute."""
        for _ in range(self.count(StepPlan(step=0))):
            self._run_without_tokens()

    def _run_without_tokens(self) -> None:
        nothing = self._layers.no_rows()
        with torch.inference_mode():
            for mlp in self._layers.sparse_mlps:
                mlp(nothing)


class LeadingLayers:
    """``DraftLayers`` of the rank that samples."""

    def __init__(self, passes: SharedPasses) -> None:
        self.num_passes = 0
        """Since the last plan."""
        self._passes = passes
        self._asked: list[RequestId] = []

    def begin(self, table: SequenceTable, plan: StepPlan) -> None:
        """See ``DraftLayers``."""
        self.num_passes = 0
        self._asked = _asked(plan)

    def logits(self, table: SequenceTable, states: list[SequenceState], ahead: int) -> torch.Tensor:
        """See ``DraftLayers``."""
        logits = self.run(table, states, ahead)
        assert logits is not None, "the rank that samples gathers logits"
        return logits

    def run(self, table: SequenceTable, states: list[SequenceState], ahead: int) -> torch.Tensor | None:
        """The next pass, which has no sequences where others draft more."""
        self.num_passes += 1
        positions = [state.num_tokens - 1 + ahead for state in states]
        rows = {
            state.request_id: (position, int(table.history(state, ahead)[-1]))
            for state, position in zip(states, positions, strict=True)
        }
        self._passes.tell([rows.get(request_id, _ABSENT) for request_id in self._asked])
        return self._passes.run(table, states, positions)


class LeadingDrafter:
    """``Drafts`` of the rank that samples."""

    def __init__(self, drafter: Drafter, layers: LeadingLayers, passes: SharedPasses) -> None:
        """``drafter`` asks ``layers``."""
        self._drafter = drafter
        self._layers = layers
        self._passes = passes

    def begin(self, table: SequenceTable, plan: StepPlan) -> None:
        """See ``Drafts``."""
        self._drafter.begin(table, plan)

    def draft(self, table: SequenceTable, plan: StepPlan) -> dict[RequestId, Draft]:
        """See ``Drafts``."""
        count = self._passes.count(plan)
        drafts = self._drafter.draft(table, plan)
        while self._layers.num_passes < count:
            self._layers.run(table, [], 0)
        return drafts


class FollowingDrafter:
    """``Drafts`` of its peers: it has none, and runs the same passes."""

    def __init__(self, passes: SharedPasses) -> None:
        self._passes = passes

    def begin(self, table: SequenceTable, plan: StepPlan) -> None:
        """See ``Drafts``."""

    def draft(self, table: SequenceTable, plan: StepPlan) -> dict[RequestId, Draft]:
        """See ``Drafts``."""
        states = [table[request_id] for request_id in _asked(plan)]
        for _ in range(self._passes.count(plan)):
            rows = self._passes.tell([_ABSENT] * len(states))
            taking_part = [(state, *row) for state, row in zip(states, rows, strict=True) if row != _ABSENT]
            for state, position, token_id in taking_part:
                # What has been sampled meanwhile is learnt with the next plan, and overwrites this.
                table.note(state, position - state.num_tokens, [token_id])
            self._passes.run(table, [row[0] for row in taking_part], [row[1] for row in taking_part])
        return {}


def _asked(plan: StepPlan) -> list[RequestId]:
    return [step.request_id for step in plan.sequences if step.num_drafts]
