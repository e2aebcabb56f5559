"""How many tokens each place of a draft brings, learnt from what became of the drafts before."""

from itertools import accumulate
from typing import Protocol

from .draft_length import Place
from .draft_tree import Draft
from .request import Request

HOPE = 0.7
"""How often a first guess is right, before any was verified, and slowly again while nothing is drafted."""
_MEMORY = 0.1
"""Share of a new outcome in what is known of a request."""
_COMMON = 0.005
"""And of all requests together."""
_RECOVERY = 0.02
_TREE_MEMORY = 0.03
_TREE_COMMON = 0.02


class Acceptance(Protocol):
    """What is known of the drafts of one method."""

    def places(self, request: Request, most: int) -> list[Place]:
        """What a draft's first, second … place brings on average; none brings more than the one before."""
        ...

    def drafted(self, request: Request, asked: int, draft: Draft) -> None:
        """What came where so many tokens were asked for."""
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

    def places(self, request: Request, most: int) -> list[Place]:
        """See ``Acceptance``."""
        acceptance = self._of(request)
        return [Place(acceptance**place) for place in range(1, most + 1)]

    def drafted(self, request: Request, asked: int, draft: Draft) -> None:
        """See ``Acceptance``."""

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
        """How often the nodes that there were turned out right."""
        self._shares = [1.0] * most
        """How often there was such a node: unlikely ones are left out."""

    def places(self, request: Request, most: int) -> list[Place]:
        """See ``Acceptance``."""
        factor = self._factor(request)
        rates = accumulate(self._rates[:most], min)
        return [Place(share * min(1.0, factor * rate), share) for rate, share in zip(rates, self._shares, strict=False)]

    def drafted(self, request: Request, asked: int, draft: Draft) -> None:
        """See ``Acceptance``."""
        for place in range(asked):
            self._shares[place] = _moved(self._shares[place], float(place < len(draft)), _TREE_COMMON)

    def learn(self, request: Request, draft: Draft, nodes: list[int]) -> None:
        """See ``Acceptance``."""
        expected = sum(self._rates[: len(draft)])
        for place in range(len(draft)):
            self._rates[place] = _moved(self._rates[place], float(place in nodes), _TREE_COMMON)
        outcome = len(nodes) / max(expected, 0.1)
        request.acceptance = _moved(self._factor(request), outcome, _TREE_MEMORY)

    def pass_over(self, request: Request) -> None:
        """See ``Acceptance``."""
        request.acceptance = _moved(self._factor(request), 1.0, _RECOVERY)

    def rest(self) -> None:
        """See ``Acceptance``."""
        pairs = zip(self._rates, self._hopes, strict=True)
        self._rates = [_moved(rate, hope, _RECOVERY / 4) for rate, hope in pairs]
        self._shares = [_moved(share, 1.0, _RECOVERY / 4) for share in self._shares]

    def _factor(self, request: Request) -> float:
        return 1.0 if request.acceptance is None else request.acceptance


def _moved(value: float, towards: float, share: float) -> float:
    return value + share * (towards - value)
