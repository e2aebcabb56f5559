"""Stop strings, found wherever token boundaries fall.

An Aho-Corasick automaton (Aho & Corasick, CACM 1975) reads each character once, however many strings there are,
and its state says how much of the text may be the beginning of one.
"""

from collections import deque
from collections.abc import Sequence


class StopStrings:
    """The automaton of some strings, shared by all choices of a request. State 0 is the root."""

    def __init__(self, strings: Sequence[str]) -> None:
        self.next: list[dict[str, int]] = [{}]
        self.depth: list[int] = [0]
        """Characters of the text that each state holds: the longest end that begins a stop string."""
        self.found: list[str | None] = [None]
        """The longest stop string that ends in each state."""
        for string in strings:
            self._add(string)
        self._fall_back()

    def _add(self, string: str) -> None:
        state = 0
        for char in string:
            if char not in self.next[state]:
                self.next[state][char] = len(self.next)
                self.next.append({})
                self.depth.append(self.depth[state] + 1)
                self.found.append(None)
            state = self.next[state][char]
        self.found[state] = string

    def _fall_back(self) -> None:
        """Link every state to that of its longest proper end."""
        self.fallback = [0] * len(self.next)
        queue = deque(self.next[0].values())
        while queue:
            state = queue.popleft()
            self.found[state] = self.found[state] or self.found[self.fallback[state]]
            for char, child in self.next[state].items():
                self.fallback[child] = self.step(self.fallback[state], char)
                queue.append(child)

    def step(self, state: int, char: str) -> int:
        """The state after one more character."""
        while state and char not in self.next[state]:
            state = self.fallback[state]
        return self.next[state].get(char, 0)


class StopChecker:
    """Watches one output. The string that is complete first ends it; the longest one if several end there."""

    def __init__(self, strings: StopStrings, *, include: bool) -> None:
        self._strings = strings
        self._include = include
        self._state = 0
        self._held = ""
        self.matched: str | None = None
        """The stop string that ended the output."""

    def push(self, text: str) -> str:
        """The text that may be shown now: all but what could be the beginning of a stop string."""
        strings, state = self._strings, self._state
        for position, char in enumerate(text, start=len(self._held) + 1):
            state = strings.step(state, char)
            if strings.found[state] is not None:
                return self._stop(self._held + text, position, strings.found[state])
        self._state = state
        held = self._held + text
        shown = len(held) - strings.depth[state]
        self._held = held[shown:]
        return held[:shown]

    def flush(self) -> str:
        """What was held back, at an end without a stop string."""
        held, self._held, self._state = self._held, "", 0
        return held

    def _stop(self, text: str, end: int, string: str | None) -> str:
        self.matched = string
        self._held = ""
        return text[:end] if self._include else text[: end - len(string or "")]
