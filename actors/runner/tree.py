"""Which guesses make the best tree."""

from collections.abc import Sequence
from heapq import heappop, heappush
from math import inf, log

from ..engine.draft_tree import ROOT, Draft


def best_tree(
    token_ids: Sequence[Sequence[int]], logprobs: Sequence[Sequence[float]], count: int, least: float = 0.0
) -> Draft:
    """The ``count`` nodes with the largest products of probabilities down to the root, in that order.

    None of a product below ``least``.

    For each depth its guesses and their log-probabilities, the likeliest first: those of a head do not depend on the
    branch. Best first, so a node comes behind its parent. Such a tree is another for each context, as in EAGLE-2 (Li et
    al., arXiv 2406.16858), where Medusa's own was fixed.
    """
    tokens: list[int] = []
    parents: list[int] = []
    # (minus the log of the product, number, depth, rank among the siblings, parent); numbers keep ties in order.
    queue = [(-logprobs[0][0], 0, 0, 0, ROOT)]
    num_pushed, most_cost = 1, -log(least) if least > 0.0 else inf
    while queue and len(tokens) < count and queue[0][0] <= most_cost:
        cost, _, depth, rank, parent = heappop(queue)
        node = len(tokens)
        tokens.append(token_ids[depth][rank])
        parents.append(parent)
        if rank + 1 < len(token_ids[depth]):
            sibling = cost + logprobs[depth][rank] - logprobs[depth][rank + 1]
            heappush(queue, (sibling, num_pushed, depth, rank + 1, parent))
        if depth + 1 < len(token_ids):
            heappush(queue, (cost - logprobs[depth + 1][0], num_pushed + 1, depth + 1, 0, node))
        num_pushed += 2
    is_chain = parents == list(range(ROOT, len(parents) - 1))
    return Draft(tuple(tokens), () if is_chain else tuple(parents))
