"""How fast the engine has been lately."""


class Throughput:
    """Tokens per second, averaged over steps that matter less the older they are."""

    __slots__ = ("_decay", "_seconds", "_tokens")

    def __init__(self, decay: float = 0.98) -> None:
        self._decay = decay
        self._tokens = 0.0
        self._seconds = 0.0

    def record(self, num_tokens: int, seconds: float) -> None:
        """A step of ``num_tokens`` took ``seconds``."""
        self._tokens = self._tokens * self._decay + num_tokens
        self._seconds = self._seconds * self._decay + seconds

    def wait_s(self, num_tokens: int, shortest: float = 1.0, longest: float = 60.0) -> float:
        """Seconds until ``num_tokens`` tokens have run, within bounds that make sense to a client."""
        if not self._tokens:
            return shortest
        return min(longest, max(shortest, num_tokens * self._seconds / self._tokens))
