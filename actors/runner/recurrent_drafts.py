"""Drafting by a recurrent head: each guess advances the state that the next one is made from."""

import torch

from ...cluster.ids import RequestId
from ..engine.plan import StepPlan
from ..models.recurrent_head import RecurrentHead
from .arrays import to_device
from .drafting import Drafter
from .sequences import SequenceState, SequenceTable


class RecurrentDrafts:
    """Implements ``DraftLayers`` and ``HiddenReader``. Nothing is kept of a sequence between steps."""

    def __init__(self, head: RecurrentHead) -> None:
        self._head = head
        self._rows: dict[RequestId, int] = {}
        """Of the sequences in what was read."""
        self._hidden = torch.empty(0)
        self._states: list[SequenceState] = []
        self._advanced = torch.empty(0)
        """[B, hidden] of those sequences, behind the last guess."""
        self._known = torch.empty(0)
        """[B, W] logits of the tokens that are ever guessed."""

    def begin(self, table: SequenceTable, plan: StepPlan) -> None:
        """See ``DraftLayers``."""
        sampling = [step.request_id for step in plan.sequences if step.samples]
        self._rows = {request_id: row for row, request_id in enumerate(sampling)}

    def read(self, hidden: torch.Tensor) -> None:
        """See ``HiddenReader``."""
        self._hidden = hidden

    def logits(self, table: SequenceTable, states: list[SequenceState], ahead: int) -> torch.Tensor:
        """See ``DraftLayers``."""
        before = self._before(states, ahead)
        last = table.tokens.cells[[state.row for state in states], [state.num_tokens - 1 + ahead for state in states]]
        self._advanced = self._head.advance(before, to_device(last.tolist(), torch.int64, before.device))
        self._states = states
        self._known = self._head.output.known(self._advanced)
        return self._head.output.spread(self._known)

    def confidence(self) -> list[float]:
        """Of each sequence, the probability of the likeliest guess at temperature 1."""
        return (self._known.amax(1) - self._known.logsumexp(1)).exp().tolist()

    def _before(self, states: list[SequenceState], ahead: int) -> torch.Tensor:
        if not ahead:
            rows = [self._rows[state.request_id] for state in states]
            return self._hidden[to_device(rows, torch.int64, self._hidden.device)]
        if len(states) == len(self._states):
            return self._advanced
        kept = [self._states.index(state) for state in states]
        return self._advanced[to_device(kept, torch.int64, self._advanced.device)]


class RecurrentDrafter(Drafter):
    """A ``Drafter`` whose layers read what the model's have made of a sequence. Implements ``HiddenReader``."""

    _layers: RecurrentDrafts

    def read(self, hidden: torch.Tensor) -> None:
        """See ``HiddenReader``."""
        self._layers.read(hidden)

    def _confidence(self, states: list[SequenceState]) -> list[float]:
        return self._layers.confidence()
