"""How fast replicas are: seeded by their own calibration, then learned from what requests took.

Replicas of a kind share what is learned. One that has served few requests is believed to be as fast as the others, and
estimates of equals do not drift apart by luck: so a router that sees an eighth of the requests chooses as well as one
that sees them all.
"""

import math
from collections import defaultdict
from collections.abc import Iterable
from statistics import median

from ...cluster.ids import ReplicaId
from ...cluster.messages import ReplicaInfo

MIN_SAMPLE_TOKENS = 16
"""Prompts shorter than this say little but noise."""
_FORGET = 0.995
_DOUBT = 0.5
"""Standard deviation, as a share: of the seeds, and of a measurement."""
_MAX_STEP = 3.0
_MAX_DRIFT = 16.0
_DEFAULT_PREFILL = 1000.0
_DEFAULT_STEP_S = 0.02
_STEP_WEIGHT = 0.03
_ALIKE = 3.0
"""Replicas of one kind whose announced speeds differ by less are taken to be equally fast."""
_LUCK = 0.15
"""A replica whose times differ from its kind's by a smaller share is as fast as its kind."""
_MEAN_WEIGHT = 0.05
_PRIOR_SAMPLES = 4


class Kind:
    """What replicas of one kind have in common: prefill time and decode step.

    A prefill takes ``fixed_s + tokens * token_s``, fitted by recursive least squares with forgetting (Ljung, 1999) on
    relative errors. A sample counts as at most 3 times faster or slower than believed, and belief stays within 16
    times the seed, so that a few wild measurements cannot spoil the choice.
    """

    def __init__(self, prefill_tokens_per_s: float, decode_step_s: float) -> None:
        self._seed_token_s = 1.0 / _usable(prefill_tokens_per_s, _DEFAULT_PREFILL)
        self._seed_step_s = _usable(decode_step_s, _DEFAULT_STEP_S)
        self.seed = prefill_tokens_per_s, decode_step_s
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
        self._prefill_miss, self._step_miss = _Mean(), _Mean()
        self.has_learned = False
        """Whether anything was measured since it was seeded."""

    def observe_prefill(self, uncached_tokens: int, seconds: float) -> float:
        """A first token came after ``seconds``. Returns how much that is more than this kind usually takes: logarithm
        of the ratio.
        """
        self.has_learned = True
        expected = self.fixed_s + uncached_tokens * self.token_s
        ratio = _clipped(seconds / expected)
        error = (ratio - 1.0) * expected
        # Gain for the regressor (1, tokens) with noise in proportion to the expected time.
        toward_fixed = self._fixed_var + self._cross * uncached_tokens
        toward_token = self._cross + self._token_var * uncached_tokens
        spread = toward_fixed + toward_token * uncached_tokens + _FORGET * (_DOUBT * expected) ** 2
        fixed_gain, token_gain = toward_fixed / spread, toward_token / spread
        self._learned(fixed_gain * toward_fixed, token_gain * toward_token, fixed_gain * toward_token)
        self.fixed_s = min(_MAX_DRIFT * self._seed_step_s, max(0.0, self.fixed_s + fixed_gain * error))
        self.token_s = _bounded(self.token_s + token_gain * error, self._seed_token_s)
        return self._prefill_miss.excess(math.log(ratio))

    def observe_step(self, seconds: float) -> float:
        """A decode step takes ``seconds`` with an empty KV cache. Returns what ``observe_prefill`` does."""
        self.has_learned = True
        ratio = _clipped(seconds / self.decode_step_s)
        self.decode_step_s = _bounded(self.decode_step_s * ratio**_STEP_WEIGHT, self._seed_step_s)
        return self._step_miss.excess(math.log(ratio))

    def _learned(self, fixed: float, token: float, cross: float) -> None:
        """Take from the covariance what a sample has told; forgetting gives some of it back."""
        self._fixed_var = min(self._most_fixed_var, (self._fixed_var - fixed) / _FORGET)
        self._token_var = min(self._most_token_var, (self._token_var - token) / _FORGET)
        limit = math.sqrt(max(0.0, self._fixed_var * self._token_var))
        self._cross = min(limit, max(-limit, (self._cross - cross) / _FORGET))


class ReplicaRates:
    """Prefill time and decode step of one replica: its kind's, times a factor of its own for each."""

    def __init__(self, kind: Kind) -> None:
        self.kind = kind
        self._prefill, self._step = _Mean(), _Mean()
        self.prefill_factor = 1.0
        """How much longer a prefill takes here than on others of the kind."""
        self.step_factor = 1.0
        """The same of a decode step."""

    @property
    def fixed_s(self) -> float:
        """Seconds of a prefill whatever its length."""
        return self.kind.fixed_s * self.prefill_factor

    @property
    def token_s(self) -> float:
        """Seconds for each uncached token."""
        return self.kind.token_s * self.prefill_factor

    @property
    def decode_step_s(self) -> float:
        """One step with an empty KV cache."""
        return self.kind.decode_step_s * self.step_factor

    @property
    def prefill_tokens_per_s(self) -> float:
        """Of a long prompt; positive and finite."""
        return 1.0 / self.token_s

    def prefill_s(self, uncached_tokens: float) -> float:
        """Seconds that so many tokens are expected to take on an idle replica."""
        return self.fixed_s + uncached_tokens * self.token_s

    def observe_prefill(self, uncached_tokens: int, seconds: float) -> None:
        """A request had its first token after ``seconds`` on a replica that had nothing else to prefill."""
        if uncached_tokens >= MIN_SAMPLE_TOKENS and math.isfinite(seconds) and seconds > 0:
            self._prefill.add(self.kind.observe_prefill(uncached_tokens, seconds))
            self.prefill_factor = self._prefill.factor

    def observe_decode(self, seconds_per_token: float, slowdown: float) -> None:
        """A request's tokens came this far apart where a step takes ``slowdown`` times that of an empty KV cache."""
        sample = seconds_per_token / max(1.0, slowdown)
        if math.isfinite(sample) and sample > 0:
            self._step.add(self.kind.observe_step(sample))
            self.step_factor = self._step.factor


class Kinds:
    """The kinds of replicas that a router knows."""

    def __init__(self) -> None:
        self._kinds: dict[tuple[object, ...], Kind] = {}

    def of(self, infos: Iterable[ReplicaInfo]) -> dict[ReplicaId, Kind]:
        """What each belongs to. The kind of a replica may be another object than before until it has learned.

        Replicas measure themselves while others start beside them. One that was lucky then must not get all that is
        new, for the others would never be tried: a kind begins with the median, and what is far from it is a kind of
        its own.
        """
        groups: defaultdict[tuple[object, ...], list[ReplicaInfo]] = defaultdict(list)
        for info in infos:
            groups[info.model, info.kernels, info.weights_format, info.num_threads, len(info.ranks)].append(info)
        found: dict[ReplicaId, Kind] = {}
        if not groups:
            return found  # the bus knows of nobody for a moment: what was learned is kept for their return
        before, self._kinds = self._kinds, {}
        for key, alike in groups.items():
            usual = (
                median(info.prefill_tokens_per_s for info in alike),
                median(info.decode_step_s for info in alike),
            )
            for info in alike:
                own = info.prefill_tokens_per_s, info.decode_step_s
                near = all(
                    middle / _ALIKE <= value <= middle * _ALIKE for value, middle in zip(own, usual, strict=True)
                )
                name, seed = (key, usual) if near else ((*key, info.replica, info.epoch), own)
                kind = self._kinds.get(name) or before.get(name)
                if kind is None or (kind.seed != seed and not kind.has_learned):
                    kind = Kind(*seed)
                found[info.replica] = self._kinds[name] = kind
        return found


class _Mean:
    """A mean that forgets, of logarithms; with few samples it stays near 0."""

    __slots__ = ("_count", "_mean")

    def __init__(self) -> None:
        self._mean = 0.0
        self._count = 0

    def add(self, value: float) -> float:
        self._count += 1
        self._mean += max(_MEAN_WEIGHT, 1 / (self._count + _PRIOR_SAMPLES)) * (value - self._mean)
        return self._mean

    def excess(self, value: float) -> float:
        """``value`` over the mean, which it then is a part of."""
        return value - self.add(value)

    @property
    def factor(self) -> float:
        """The mean as a factor, 1 within ``_LUCK``."""
        beyond = max(0.0, abs(self._mean) - _LUCK)
        return math.exp(math.copysign(beyond, self._mean))


def _usable(seed: float, default: float) -> float:
    return float(seed) if math.isfinite(seed) and 1e-9 < seed < 1e12 else default


def _clipped(ratio: float) -> float:
    return min(_MAX_STEP, max(1.0 / _MAX_STEP, ratio))


def _bounded(value: float, seed: float) -> float:
    return min(seed * _MAX_DRIFT, max(seed / _MAX_DRIFT, value))
