"""Which tokens are drafted for whom, and what became of them.

A draft is a guess of the tokens after a sequence's last one. The step that computes the last one computes the drafted
ones behind it too; as far as they are what the model would have sampled, one step has brought several tokens. Drafts
are lists of tokens in a plan, wherever they come from: the engine looks them up in the sequence (ngram), or the ranks
make them after a step and send them with its result. See ``draft_tree`` for the form of a draft.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from ...cluster.speculative_config import SpeculativeConfig
from .acceptance import Acceptance, ChainAcceptance, TreeAcceptance
from .draft_length import StepSeconds, StepShape, draft_lengths
from .draft_tree import Draft
from .ngram import NgramIndex
from .plan import StepPlan
from .request import Request

REST_STEPS = (16, 512)
"""Steps without drafts, once none was worth it, before it is asked again: fewest, and most after many vain attempts."""
_MOST_TRIED = 0.01
"""Of the time that may go into attempts: a drafting model computes all that it has missed before its first guess."""
_MOST_TRY = 10.0
"""Steps that an attempt may be as long as, beside its own; beyond that it was disturbed."""
_MARGIN = 0.7
"""Of the probability that would pay: those of heads are not exact, and what is never tried is not learnt."""
_PASSES = {"ngram": 0, "medusa": 1}
"""Passes that are counted where there are not as many as tokens: heads are one, however deep their tree is."""


@dataclass(slots=True)
class DraftCounts:
    """Since the start."""

    drafts: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    accepted_by_place: list[int] = field(default_factory=list[int])
    """How often the draft was accepted up to its first, second … token."""

    def add(self, num_drafted: int, num_accepted: int) -> None:
        """One draft that was verified."""
        self.drafts += 1
        self.draft_tokens += num_drafted
        self.accepted_tokens += num_accepted
        self.accepted_by_place += [0] * (num_accepted - len(self.accepted_by_place))
        for place in range(num_accepted):
            self.accepted_by_place[place] += 1


class Speculator:
    """Decides on drafts for the scheduler, and learns from what is accepted and how long steps take."""

    def __init__(self, config: SpeculativeConfig) -> None:
        self.config = config
        self.counts = DraftCounts()
        self._seconds = StepSeconds()
        self._most_passes = _PASSES.get(config.method, config.num_speculative_tokens)
        self._acceptance: Acceptance = (
            TreeAcceptance(config.num_speculative_tokens) if config.method == "medusa" else ChainAcceptance()
        )
        self.least_probability = 0.0
        """Of guesses that are worth verifying, by the last lengths that were asked for."""
        self._rest = 0
        self._patience = REST_STEPS[0]
        self._rest_rows = 0
        self._has_rested = False
        self._tries = False
        """The step in flight is one that a rest was ended for."""
        self._worth_of_tries = (0, 0)
        """Steps that the last two attempts must be followed by, to have been cheap. One may have been disturbed."""
        self._longest = 1
        """Draft lengths that steps have been seen with, doubled: what is longer might be very slow."""

    def waits_for(self, request: Request) -> bool:
        """Whether a request's next step should see what the one before sampled, for there may be a draft."""
        return request.params.speculative and not self._rest

    def drafts(self, requests: Sequence[Request], rows: int) -> dict[Request, Draft]:
        """Drafts for those of the requests that have some. ``rows`` decodes are in the step."""
        if self.config.drafts_on_ranks:
            return {request: request.draft for request in requests if request.draft}
        if self._rest:
            return {}
        found = {request: self._look_up(request) for request in requests if request.params.speculative}
        found = {request: draft for request, draft in found.items() if draft}
        lengths = self._lengths(list(found), rows)
        return {request: draft.first(length) for (request, draft), length in zip(found.items(), lengths, strict=True)}

    def lengths(self, requests: Sequence[Request], rows: int) -> dict[Request, int]:
        """Tokens that the ranks shall draft after the step, for the next one, which will have ``rows`` decodes."""
        if not self.config.drafts_on_ranks or self._rest:
            return {}
        wanted = [request for request in requests if request.params.speculative]
        return dict(zip(wanted, self._lengths(wanted, rows), strict=True))

    def _lengths(self, requests: Sequence[Request], rows: int) -> list[int]:
        most = self.config.num_speculative_tokens
        if not self.config.adaptive or not requests:
            return [most] * len(requests)
        if not self._seconds.is_known:
            return [0] * len(requests)
        most = min(most, self._longest)
        places = [self._acceptance.places(request, most) for request in requests]
        costs = self._seconds.costs(rows)
        lengths, row = draft_lengths(places, rows, costs, most_passes=self._most_passes)
        self.least_probability = _MARGIN * row
        self._longest = max(self._longest, 2 * max(lengths))
        if any(lengths):
            self._patience = max(REST_STEPS[0], self._patience - REST_STEPS[0])
        elif self._has_rested:  # what was measured then may have changed: one token tells, and costs next to nothing
            lengths, self._tries = [1] * len(requests), True
        else:
            self._rest, self._rest_rows = max(self._patience, min(self._worth_of_tries)), rows
            self._patience = min(2 * self._patience, REST_STEPS[1])
        self._has_rested = False
        for request, length in zip(requests, lengths, strict=True):
            if not length:
                self._acceptance.pass_over(request)
        return lengths

    def _look_up(self, request: Request) -> Draft:
        if request.ngrams is None:
            request.ngrams = NgramIndex(self.config.prompt_lookup_min, self.config.prompt_lookup_max)
        return Draft(tuple(request.ngrams.continuation(request.tokens, self.config.num_speculative_tokens)))

    def drafted(self, request: Request) -> None:
        """The ranks have made the draft that they were asked for."""
        self._acceptance.drafted(request, request.num_asked, request.draft)

    def verified(self, request: Request, draft: Draft, sampled: Sequence[int]) -> None:
        """A step that verified a draft brought these tokens."""
        nodes = draft.path(sampled)
        self.counts.add(len(draft), len(nodes))
        self._acceptance.learn(request, draft, nodes)

    def shape(self, plan: StepPlan) -> StepShape | None:
        """Of a step of decodes; None for others, whose time says little."""
        if any(step.num_tokens - len(step.draft) > 1 for step in plan.sequences):
            return None
        passes = min(max(step.num_drafts for step in plan.sequences), self._most_passes)
        return StepShape(plan.num_tokens, passes)

    def stepped(self, shape: StepShape | None, seconds: float) -> None:
        """A step is done."""
        if shape is not None:
            if self._tries and shape.passes:
                self._tries, self._worth_of_tries = False, (self._worth_of_tries[1], self._steps_for(shape, seconds))
            if self._seconds.record(shape, seconds):
                self._patience = REST_STEPS[0]  # it was judged by times that hold no more
            if 2 * shape.rows <= self._rest_rows:
                self._rest = self._rest_rows = 0  # drafts that many rows leave no time for may pay for few
        if self._rest:
            self._rest -= 1
            self._has_rested = not self._rest
            self._acceptance.rest()

    def _steps_for(self, shape: StepShape, seconds: float) -> int:
        """How many steps without drafts make an attempt that took so long a small part of the time."""
        base, per_row, _ = self._seconds.costs(shape.rows)
        plain = base + per_row * shape.rows
        return round(min(seconds / plain - 1.0, _MOST_TRY) / _MOST_TRIED) if 0.0 < plain < seconds else 0
