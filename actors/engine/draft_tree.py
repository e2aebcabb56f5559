"""Trees of drafted tokens: several guesses for one place, of which at most one is right.

A tree is a list of tokens, with the place in that list of each one's parent, which comes before it; ``ROOT`` stands for
the last token that is known. Without parents it is a chain.
"""

from collections.abc import Sequence

ROOT = -1


def parents_of(parents: Sequence[int], count: int) -> Sequence[int]:
    """Those of ``count`` nodes, also of a chain."""
    return parents or range(ROOT, count - 1)


def depths(parents: Sequence[int]) -> list[int]:
    """How many places behind the root each node stands."""
    found: list[int] = []
    for parent in parents:
        found.append(1 if parent == ROOT else found[parent] + 1)
    return found


def ancestor_masks(parents: Sequence[int]) -> list[int]:
    """What the root and each node see: bit 0 is the root, bit n + 1 is node n."""
    found = [1]
    for node, parent in enumerate(parents):
        found.append(found[parent + 1] | 2 << node)
    return found


def standing(token_ids: Sequence[int], parents: Sequence[int], chosen: Sequence[int]) -> list[int]:
    """The nodes from the root on that are what was chosen: ``chosen`` at the root, then at each node."""
    found: list[int] = []
    at = ROOT
    for node, (token_id, parent) in enumerate(zip(token_ids, parents_of(parents, len(token_ids)), strict=True)):
        if parent == at and token_id == chosen[at + 1]:
            found.append(node)
            at = node
    return found


def path(token_ids: Sequence[int], parents: Sequence[int], sampled: Sequence[int]) -> list[int]:
    """The nodes from the root on whose tokens are those that were sampled."""
    found: list[int] = []
    at = ROOT
    for node, (token_id, parent) in enumerate(zip(token_ids, parents_of(parents, len(token_ids)), strict=True)):
        if parent == at and len(found) < len(sampled) and token_id == sampled[len(found)]:
            found.append(node)
            at = node
    return found
