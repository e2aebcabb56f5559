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

    @property
    def per_s(self) -> float:
        """Tokens per second; 0 before the first step."""
        return self._tokens / self._seconds if self._seconds else 0.0
