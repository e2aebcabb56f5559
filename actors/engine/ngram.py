"""Prompt lookup: what followed the last tokens when they stood in the sequence before is likely to follow again.

Saxena, "Prompt Lookup Decoding", 2023. Every token is indexed once, so a look-up costs the same in a long context.
"""

from array import array

MAX_INDEXED = 2048
"""Tokens that one call takes in: a long prompt must not hold up a step."""


class NgramIndex:
    """Where runs of tokens of one growing sequence stood last."""

    __slots__ = ("_ends", "_indexed", "_sizes")

    def __init__(self, shortest: int, longest: int) -> None:
        self._sizes = range(longest, shortest - 1, -1)
        self._ends: dict[bytes, int] = {}
        """By a run's tokens, the place after its last occurrence that something follows."""
        self._indexed = 0

    def continuation(self, tokens: "array[int]", count: int) -> list[int]:
        """What ``count`` tokens would follow, by the longest run at the end that occurred before; none: no such run.

        ``tokens`` begin with those of the call before.
        """
        length = len(tokens)
        last = min(length, self._indexed + 1 + MAX_INDEXED)
        for end in range(self._indexed + 1, last):
            for size in self._sizes:
                if size <= end:
                    self._ends[tokens[end - size : end].tobytes()] = end
        self._indexed = max(self._indexed, last - 1)
        for size in self._sizes:
            end = self._ends.get(tokens[length - size :].tobytes()) if size < length else None
            if end is not None:
                return _repeat(tokens, end, count)
        return []


def _repeat(tokens: "array[int]", start: int, count: int) -> list[int]:
    """``count`` tokens from ``start`` on; where they run into the end, what is repeated repeats again."""
    period = len(tokens) - start
    return [tokens[start + offset % period] for offset in range(count)]
