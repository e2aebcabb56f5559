"""How fast a replica is: seeded by its own calibration, then learned from what requests took."""

import math

from .warm_prefix import decode_slowdown

MIN_SAMPLE_TOKENS = 128
"""Below this, fixed costs hide the rate."""
_WEIGHT = 0.2
_MAX_STEP = 3.0
_MAX_DRIFT = 16.0
_DEFAULT_PREFILL = 1000.0
_DEFAULT_STEP_S = 0.02


class ReplicaRates:
    """Prefill tokens per second and decode step of one replica, as bounded geometric moving averages.

    A sample counts as at most 3 times faster or slower than believed, and belief stays within 16 times the seed,
    so that a few wild measurements cannot spoil the choice.
    """

    def __init__(self, prefill_tokens_per_s: float, decode_step_s: float) -> None:
        self._prefill = _Average(prefill_tokens_per_s, _DEFAULT_PREFILL)
        self._decode = _Average(decode_step_s, _DEFAULT_STEP_S)

    @property
    def prefill_tokens_per_s(self) -> float:
        """Positive and finite."""
        return self._prefill.value

    @property
    def decode_step_s(self) -> float:
        """One step with an empty KV cache; positive and finite."""
        return self._decode.value

    def observe_prefill(self, uncached_tokens: int, seconds: float) -> None:
        """A request had its first token after ``seconds`` on a replica that had nothing else to prefill."""
        if uncached_tokens >= MIN_SAMPLE_TOKENS and seconds > 0:
            self._prefill.observe(uncached_tokens / seconds)

    def observe_decode(self, seconds_per_token: float, kv_usage: float) -> None:
        """A request's tokens came this far apart while that share of the KV cache was in use."""
        self._decode.observe(seconds_per_token / decode_slowdown(max(0.0, kv_usage)))


class _Average:
    """Moving average of logarithms."""

    def __init__(self, seed: float, default: float) -> None:
        usable = math.isfinite(seed) and 1e-9 < seed < 1e12
        self._seed = self.value = float(seed) if usable else default

    def observe(self, sample: float) -> None:
        if not (math.isfinite(sample) and sample > 0):
            return
        ratio = min(_MAX_STEP, max(1 / _MAX_STEP, sample / self.value))
        moved = self.value * ratio**_WEIGHT
        self.value = min(self._seed * _MAX_DRIFT, max(self._seed / _MAX_DRIFT, moved))
