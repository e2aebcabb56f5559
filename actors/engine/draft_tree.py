"""Drafts: guesses of what follows a sequence's last token, as a chain or as a tree.

A tree has several guesses for one place, of which at most one is right. It is a list of tokens with the place in that
list of each one's parent, which comes before it; ``ROOT`` stands for the last token that is known.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

ROOT = -1


@dataclass(frozen=True, slots=True)
class Draft:
    """Guesses, the more promising ones first; each is a node."""

    token_ids: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()
    """Of a tree. None: each token is the parent of the next one."""

    def __len__(self) -> int:
        return len(self.token_ids)

    def first(self, count: int) -> "Draft":
        """Its first ``count`` tokens."""
        return Draft(self.token_ids[:count], self.parents[:count])

    def standing(self, chosen: Sequence[int]) -> list[int]:
        """The nodes from the root on that are what was chosen: ``chosen`` at the root, then at each node."""
        nodes: list[int] = []
        at = ROOT
        for node, parent in self._links():
            if parent == at and self.token_ids[node] == chosen[at + 1]:
                nodes.append(node)
                at = node
        return nodes

    def path(self, sampled: Sequence[int]) -> list[int]:
        """The nodes from the root on whose tokens are those that were sampled."""
        nodes: list[int] = []
        at = ROOT
        for node, parent in self._links():
            if parent == at and len(nodes) < len(sampled) and self.token_ids[node] == sampled[len(nodes)]:
                nodes.append(node)
                at = node
        return nodes

    def branch(self, node: int) -> list[int]:
        """Tokens from the root's child on down to a node; none for the root."""
        if not self.parents:
            return list(self.token_ids[: node + 1])
        tokens: list[int] = []
        while node != ROOT:
            tokens.append(self.token_ids[node])
            node = self.parents[node]
        return tokens[::-1]

    def _links(self) -> Iterator[tuple[int, int]]:
        return enumerate(self.parents or range(ROOT, len(self) - 1))


NO_DRAFT = Draft()


def depths(parents: Sequence[int]) -> list[int]:
    """How many places behind the root each node of a tree stands."""
    found: list[int] = []
    for parent in parents:
        found.append(1 if parent == ROOT else found[parent] + 1)
    return found


def ancestor_masks(parents: Sequence[int]) -> list[int]:
    """What the root and each node of a tree see: bit 0 is the root, bit n + 1 is node n."""
    found = [1]
    for node, parent in enumerate(parents):
        found.append(found[parent + 1] | 2 << node)
    return found
