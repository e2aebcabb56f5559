"""Guesses of the next tokens by layers that cost less than the model: a small model's, or the model's own first ones.

After a step that asks for drafts, each pass guesses one token more for every sequence. What is guessed goes to the
engine with the step's result, and comes back in a later plan to be verified. The distributions that guesses were drawn
from stay here, with the sequence.
"""

from typing import Protocol, runtime_checkable

import torch

from ...cluster.ids import RequestId
from ..engine.draft_tree import Draft
from ..engine.plan import StepPlan
from .arrays import to_device
from .choice import Choice, draw_weights
from .constraints import constrain
from .draw import Stream, draw, uniform
from .rows import SamplingRow, changes_logits
from .sequences import SequenceState, SequenceTable


class DraftLayers(Protocol):
    """What computes guesses."""

    def begin(self, table: SequenceTable, plan: StepPlan) -> None:
        """A plan that has been applied to the table is about to run."""
        ...

    def logits(self, table: SequenceTable, states: list[SequenceState], ahead: int) -> torch.Tensor:
        """[B, vocab] float32 of what follows each sequence's last token and ``ahead`` guesses behind it.

        Called for 0, 1, 2 … guesses, with fewer sequences each time.
        """
        ...


class Drafts(Protocol):
    """What a runner asks for guesses."""

    def begin(self, table: SequenceTable, plan: StepPlan) -> None:
        """A plan that has been applied to the table is about to run."""
        ...

    def draft(self, table: SequenceTable, plan: StepPlan) -> dict[RequestId, Draft]:
        """After the step: guesses for the sequences that the plan asks them for, as many as have pages.

        On ranks that do not sample there are none.
        """
        ...


@runtime_checkable
class HiddenReader(Protocol):
    """Guesses from what the model's layers have made of a sequence."""

    def read(self, hidden: torch.Tensor) -> None:
        """After a step, before ``draft``: hidden states [S, hidden] behind the final norm.

        Those that the last token of each sequence which samples was sampled from, in the plan's order.
        """
        ...


class Drafter:
    """Draws guesses as the request's own parameters say."""

    def __init__(
        self, layers: DraftLayers, choice: Choice, eos_token_ids: tuple[int, ...], block_size: int, *, coupled: bool
    ) -> None:
        """``coupled`` draws with the numbers that the model's own tokens are drawn with; else guesses can be tested."""
        self._layers = layers
        self._choice = choice
        self._eos_token_ids = eos_token_ids
        self._block_size = block_size
        self._coupled = coupled

    def begin(self, table: SequenceTable, plan: StepPlan) -> None:
        """See ``Drafts``."""
        self._layers.begin(table, plan)

    def draft(self, table: SequenceTable, plan: StepPlan) -> dict[RequestId, Draft]:
        """See ``Drafts``."""
        wanted: dict[SequenceState, int] = {}
        for step in plan.sequences:
            if step.num_drafts:
                state = table[step.request_id]
                room = state.num_blocks * self._block_size - state.num_tokens + 1
                wanted[state] = min(step.num_drafts, room)
        weights: dict[SequenceState, list[torch.Tensor]] = {state: [] for state in wanted}
        for ahead in range(max(wanted.values(), default=0)):
            states = [state for state, count in wanted.items() if count > ahead]
            if not states:
                break
            logits = self._layers.logits(table, states, ahead)
            token_ids, drawn_from = self._choose(table, states, ahead, logits)
            for index, state in enumerate(states):
                table.note(state, ahead, token_ids[index : index + 1])
                if index in drawn_from:
                    weights[state].append(drawn_from[index])
        for state, rows in weights.items():
            state.draft_weights = torch.stack(rows) if rows else None
        return {
            state.request_id: Draft(tuple(table.history(state, count)[state.num_tokens :].tolist()))
            for state, count in wanted.items()
            if count > 0
        }

    def _choose(
        self, table: SequenceTable, states: list[SequenceState], ahead: int, logits: torch.Tensor
    ) -> tuple[list[int], dict[int, torch.Tensor]]:
        """Token ids [B], and for rows that were drawn to be tested the probabilities [vocab]."""
        if all(state.is_plain for state in states):
            return self._choice.likeliest(logits).tolist(), {}
        history = [table.history(state, ahead) for state in states]
        rows = [
            SamplingRow(state.params, state.seed, state.num_prompt, token_ids, state.guide)
            for state, token_ids in zip(states, history, strict=True)
        ]
        if any(changes_logits(row.params) for row in rows):
            constrain(logits, rows, self._eos_token_ids)
        drawn = [] if self._coupled else [index for index, row in enumerate(rows) if not row.params.greedy]
        if not drawn:
            return self._choice.choose(logits, rows).tolist(), {}
        where, own = to_device(drawn, torch.int64, logits.device), [rows[index] for index in drawn]
        weights = draw_weights(logits[where], own)
        weights /= weights.sum(1, keepdim=True)
        numbers = [uniform(row.seed, row.num_output, Stream.DRAFT) for row in own]
        token_ids = self._choice.likeliest(logits)
        token_ids[where] = draw(weights, to_device(numbers, torch.float64, logits.device))
        return token_ids.tolist(), dict(zip(drawn, weights, strict=True))
