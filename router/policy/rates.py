"""How fast a replica is: seeded by its own calibration, then learned from what requests took."""

import math
from collections import defaultdict
from collections.abc import Iterable
from statistics import median

from ...cluster.ids import ReplicaId
from ...cluster.messages import ReplicaInfo

MIN_SAMPLE_TOKENS = 16
"""Prompts shorter than this say little but noise."""
_FORGET = 0.97
_DOUBT = 0.5
"""Standard deviation, as a share: of the seeds, and of a measurement."""
_MAX_STEP = 3.0
_MAX_DRIFT = 16.0
_DEFAULT_PREFILL = 1000.0
_DEFAULT_STEP_S = 0.02
_WEIGHT = 0.2
_ALIKE = 3.0
"""Replicas of one kind whose announced speeds differ by less are taken to be equally fast."""


class ReplicaRates:
    """Prefill time and decode step of one replica.

    A prefill takes ``fixed_s + tokens * token_s``, fitted by recursive least squares with forgetting (Ljung, 1999) on
    relative errors. A sample counts as at most 3 times faster or slower than believed, and belief stays within 16
    times the seed, so that a few wild measurements cannot spoil the choice.
    """

    def __init__(self, prefill_tokens_per_s: float, decode_step_s: float) -> None:
        self._seed_token_s = 1.0 / _usable(prefill_tokens_per_s, _DEFAULT_PREFILL)
        self._seed_step_s = _usable(decode_step_s, _DEFAULT_STEP_S)
        self.fixed_s = 0.0
        """Seconds of a prefill whatever its length."""
        self.token_s = self._seed_token_s
        """Seconds for each uncached token."""
        self.decode_step_s = self._seed_step_s
        """One step with an empty KV cache."""
        # Covariance of (fixed_s, token_s): what is believed to be possible at first.
        self._fixed_var = self._most_fixed_var = (_DOUBT * self._seed_step_s) ** 2
        self._token_var = self._most_token_var = (_DOUBT * self._seed_token_s) ** 2
        self._cross = 0.0
        self.has_learned = False
        """Whether anything was measured since it was seeded."""

    @property
    def prefill_tokens_per_s(self) -> float:
        """Of a long prompt; positive and finite."""
        return 1.0 / self.token_s

    def prefill_s(self, uncached_tokens: float) -> float:
        """Seconds that so many tokens are expected to take on an idle replica."""
        return self.fixed_s + uncached_tokens * self.token_s

    def observe_prefill(self, uncached_tokens: int, seconds: float) -> None:
        """A request had its first token after ``seconds`` on a replica that had nothing else to prefill."""
        if uncached_tokens < MIN_SAMPLE_TOKENS or not (math.isfinite(seconds) and seconds > 0):
            return
        self.has_learned = True
        expected = self.prefill_s(uncached_tokens)
        error = min(_MAX_STEP * expected, max(expected / _MAX_STEP, seconds)) - expected
        # Gain for the regressor (1, tokens) with noise in proportion to the expected time.
        toward_fixed = self._fixed_var + self._cross * uncached_tokens
        toward_token = self._cross + self._token_var * uncached_tokens
        spread = toward_fixed + toward_token * uncached_tokens + _FORGET * (_DOUBT * expected) ** 2
        fixed_gain, token_gain = toward_fixed / spread, toward_token / spread
        self._learned(fixed_gain * toward_fixed, token_gain * toward_token, fixed_gain * toward_token)
        self.fixed_s = min(_MAX_DRIFT * self._seed_step_s, max(0.0, self.fixed_s + fixed_gain * error))
        self.token_s = _bounded(self.token_s + token_gain * error, self._seed_token_s)

    def observe_decode(self, seconds_per_token: float, slowdown: float) -> None:
        """A request's tokens came this far apart where a step takes ``slowdown`` times that of an empty KV cache."""
        sample = seconds_per_token / max(1.0, slowdown)
        if math.isfinite(sample) and sample > 0:
            self.has_learned = True
            ratio = min(_MAX_STEP, max(1 / _MAX_STEP, sample / self.decode_step_s))
            self.decode_step_s = _bounded(self.decode_step_s * ratio**_WEIGHT, self._seed_step_s)

    def _learned(self, fixed: float, token: float, cross: float) -> None:
        """Take from the covariance what a sample has told; forgetting gives some of it back."""
        self._fixed_var = min(self._most_fixed_var, (self._fixed_var - fixed) / _FORGET)
        self._token_var = min(self._most_token_var, (self._token_var - token) / _FORGET)
        limit = math.sqrt(max(0.0, self._fixed_var * self._token_var))
        self._cross = min(limit, max(-limit, (self._cross - cross) / _FORGET))


def seeds(infos: Iterable[ReplicaInfo]) -> dict[ReplicaId, tuple[float, float]]:
    """(prefill tokens per second, seconds of a decode step) to begin with, for ``ReplicaRates``.

    Replicas measure themselves while others start beside them. One that was lucky then must not get all that is new,
    for the others would never be tried: those of a kind begin with its median, except for what is far from it.
    """
    kinds: defaultdict[tuple[object, ...], list[ReplicaInfo]] = defaultdict(list)
    for info in infos:
        kinds[info.model, info.kernels, info.weights_format, info.num_threads, len(info.ranks)].append(info)
    found: dict[ReplicaId, tuple[float, float]] = {}
    for alike in kinds.values():
        prefill = median(info.prefill_tokens_per_s for info in alike)
        step = median(info.decode_step_s for info in alike)
        for info in alike:
            found[info.replica] = _near(info.prefill_tokens_per_s, prefill), _near(info.decode_step_s, step)
    return found


def _near(own: float, usual: float) -> float:
    return usual if usual / _ALIKE <= own <= usual * _ALIKE else own


def _usable(seed: float, default: float) -> float:
    return float(seed) if math.isfinite(seed) and 1e-9 < seed < 1e12 else default


def _bounded(value: float, seed: float) -> float:
    return min(seed * _MAX_DRIFT, max(seed / _MAX_DRIFT, value))
