"""How many tokens each place of a draft brings, learnt from what became of the drafts before."""

from itertools import accumulate
from typing import Protocol

from .draft_tree import Draft
from .request import Request

HOPE = 0.7
"""How often a first guess is right, before any was verified, and slowly again while nothing is drafted."""
_MEMORY = 0.1
"""Share of a new outcome in what is known of a request."""
_COMMON = 0.005
"""And of all requests together."""
_RECOVERY = 0.02
_TREE_COMMON = 0.02
_MOST_FACTOR = 2.0


class Acceptance(Protocol):
    """What is known of the drafts of one method."""

    def gains(self, request: Request, most: int) -> list[float]:
        """Tokens that a draft's first, second … place brings on average; none brings more than the one before."""
        ...

    def learn(self, request: Request, draft: Draft, nodes: list[int]) -> None:
        """Of a draft, these places were right."""
        ...

    def pass_over(self, request: Request) -> None:
        """Nothing was worth drafting for it: what is known of it matters a little less."""
        ...

    def rest(self) -> None:
        """A step without drafts: what is known of them all matters a little less."""
        ...


class ChainAcceptance:
    """A chain stands up to its first error, and each of its tokens is right as often as the others."""

    def __init__(self) -> None:
        self._common = HOPE

    def gains(self, request: Request, most: int) -> list[float]:
        """See ``Acceptance``."""
        acceptance = self._of(request)
        return [acceptance**place for place in range(1, most + 1)]

    def learn(self, request: Request, draft: Draft, nodes: list[int]) -> None:
        """See ``Acceptance``."""
        mine = self._of(request)
        for place in range(min(len(nodes) + 1, len(draft))):
            outcome = float(place < len(nodes))
            mine = _moved(mine, outcome, _MEMORY)
            self._common = _moved(self._common, outcome, _COMMON)
        request.acceptance = mine

    def pass_over(self, request: Request) -> None:
        """See ``Acceptance``."""
        request.acceptance = _moved(self._of(request), self._common, _RECOVERY)

    def rest(self) -> None:
        """See ``Acceptance``."""
        self._common = _moved(self._common, HOPE, _RECOVERY / 4)

    def _of(self, request: Request) -> float:
        return self._common if request.acceptance is None else request.acceptance


class TreeAcceptance:
    """How often the most promising node of a tree is right, the second …, and by how much a request exceeds that.

    The place of a node among the others says what it brings: whether it is a deep guess or a second choice does not
    matter, for nodes are in the order of their probabilities.
    """

    def __init__(self, most: int) -> None:
        """Of trees of up to ``most`` nodes."""
        self._hopes = [HOPE / (place + 1) for place in range(most)]
        self._rates = list(self._hopes)

    def gains(self, request: Request, most: int) -> list[float]:
        """See ``Acceptance``."""
        factor = self._factor(request)
        return [min(1.0, factor * rate) for rate in accumulate(self._rates[:most], min)]

    def learn(self, request: Request, draft: Draft, nodes: list[int]) -> None:
        """See ``Acceptance``."""
        expected = sum(self._rates[: len(draft)])
        for place in range(len(draft)):
            self._rates[place] = _moved(self._rates[place], float(place in nodes), _TREE_COMMON)
        outcome = min(_MOST_FACTOR, len(nodes) / max(expected, 1e-3))
        request.acceptance = _moved(self._factor(request), outcome, _MEMORY)

    def pass_over(self, request: Request) -> None:
        """See ``Acceptance``."""
        request.acceptance = _moved(self._factor(request), 1.0, _RECOVERY)

    def rest(self) -> None:
        """See ``Acceptance``."""
        self._rates = [_moved(rate, hope, _RECOVERY / 4) for rate, hope in zip(self._rates, self._hopes, strict=True)]

    def _factor(self, request: Request) -> float:
        return 1.0 if request.acceptance is None else request.acceptance


def _moved(value: float, towards: float, share: float) -> float:
    return value + share * (towards - value)
