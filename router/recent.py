"""What requests have met with lately: counts and latencies of the last minute, small enough to tell other routers.

Latencies are counted in classes that grow by a tenth, so a quantile is right to 5 %, a wait for a token costs one
logarithm, and what several routers count adds up.
"""

import math
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..cluster.errors import InvalidRequestError, WarmrootError
from ..cluster.ids import ReplicaId
from ..cluster.messages import FinishReason, TokenDelta

WINDOW_S = 60.0
_SLOT_S = 5.0
_NUM_SLOTS = round(WINDOW_S / _SLOT_S)
_GROWTH = math.log(1.1)
_MOST_CLASS = 150
"""1.1 ** 150 is three weeks, 1.1 ** -150 is less than a microsecond."""
_FAILURES = frozenset({FinishReason.ERROR, FinishReason.LOST, FinishReason.DEADLINE})

Classes = Mapping[int, int]
"""Class of a latency to how many there were; class ``c`` is around 1.1 ** c seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """Sequences of the last ``span_s`` seconds, at most ``WINDOW_S``; n choices of a prompt are n sequences."""

    span_s: float = 1.0
    started: int = 0
    """Those that got a first token."""
    failed: int = 0
    """Those that were refused or failed, for want of room, time or an engine; not those that clients abort."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    """Of the prompt tokens, found cached."""
    output_tokens: int = 0
    ttft: Classes = field(default_factory=dict[int, int])
    """Time to first token, from the router's receipt of the prompt."""
    itl: Classes = field(default_factory=dict[int, int])
    """Time between deltas."""

    def __add__(self, other: "Figures") -> "Figures":
        return Figures(
            span_s=max(self.span_s, other.span_s),
            started=self.started + other.started,
            failed=self.failed + other.failed,
            prompt_tokens=self.prompt_tokens + other.prompt_tokens,
            cached_tokens=self.cached_tokens + other.cached_tokens,
            output_tokens=self.output_tokens + other.output_tokens,
            ttft=Counter(self.ttft) + Counter(other.ttft),
            itl=Counter(self.itl) + Counter(other.itl),
        )

    def to_wire(self) -> list[Any]:
        """For msgpack."""
        counts = [self.started, self.failed, self.prompt_tokens, self.cached_tokens, self.output_tokens]
        return [self.span_s, counts, dict(self.ttft), dict(self.itl)]

    @classmethod
    def from_wire(cls, wire: Any) -> "Figures":
        """Inverse of ``to_wire``. Raises ValueError, TypeError or AttributeError for what is none."""
        span_s, counts, ttft, itl = wire
        started, failed, prompt_tokens, cached_tokens, output_tokens = map(_count, counts)
        if not 0 < float(span_s) <= WINDOW_S:
            raise ValueError(f"figures must be of at most {WINDOW_S:g} s, not {span_s!r:.40}")
        return cls(
            span_s=float(span_s),
            started=started,
            failed=failed,
            prompt_tokens=prompt_tokens,
            cached_tokens=cached_tokens,
            output_tokens=output_tokens,
            ttft=_classes(ttft),
            itl=_classes(itl),
        )


def quantile(classes: Classes, share: float) -> float | None:
    """Seconds within which that share of the latencies lies; None without any."""
    left = share * sum(classes.values())
    for number in sorted(classes):
        left -= classes[number]
        if left <= 0:
            return math.exp(number * _GROWTH)
    return None


class RecentFigures:
    """Counts the sequences of one router; ``clock`` gives monotonic seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._began = clock()
        self._slots: deque[_Slot] = deque(maxlen=_NUM_SLOTS)

    def watch(self) -> "Watch":
        """A sequence that begins now."""
        return Watch(self, self._clock)

    def slot(self, now: float) -> "_Slot":
        """Where what happens now is counted."""
        number = int(now // _SLOT_S)
        if not self._slots or self._slots[-1].number != number:
            self._slots.append(_Slot(number))
        return self._slots[-1]

    def figures(self) -> Figures:
        """Those of the last minute."""
        now = self._clock()
        oldest = int(now // _SLOT_S) - _NUM_SLOTS + 1
        total = Figures(span_s=max(1.0, min(now - oldest * _SLOT_S, now - self._began)))
        return sum((slot.figures() for slot in self._slots if slot.number >= oldest), total)

    def hit_rates(self) -> dict[ReplicaId, float]:
        """Replica to the share of prompt tokens that it had cached, of sequences that began in the last minute."""
        oldest = int(self._clock() // _SLOT_S) - _NUM_SLOTS + 1
        prompts, cached = Counter[ReplicaId](), Counter[ReplicaId]()
        for slot in self._slots:
            if slot.number >= oldest:
                prompts.update(slot.prompts_of)
                cached.update(slot.cached_of)
        return {replica: cached[replica] / tokens for replica, tokens in prompts.items() if tokens}


class Watch:
    """One sequence, from the router's receipt of its prompt on. A context that counts the error which ends it."""

    __slots__ = ("_clock", "_has_begun", "_last", "_recent")

    def __init__(self, recent: RecentFigures, clock: Callable[[], float]) -> None:
        self._recent = recent
        self._clock = clock
        self._last = clock()
        self._has_begun = False

    def __enter__(self) -> "Watch":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, WarmrootError) and not isinstance(error, InvalidRequestError):
            self._recent.slot(self._clock()).failed += 1

    def saw(self, delta: TokenDelta, prompt_tokens: int) -> None:
        """Its next delta."""
        now = self._clock()
        slot = self._recent.slot(now)
        if self._has_begun:
            slot.itl[_class_of(now - self._last)] += 1
        else:
            self._has_begun = True
            slot.started += 1
            slot.prompt_tokens += prompt_tokens
            slot.cached_tokens += delta.cached_tokens or 0
            if delta.replica is not None:
                slot.prompts_of[delta.replica] += prompt_tokens
                slot.cached_of[delta.replica] += delta.cached_tokens or 0
            slot.ttft[_class_of(now - self._last)] += 1
        slot.output_tokens += len(delta.token_ids)
        slot.failed += delta.finish_reason in _FAILURES
        self._last = now


@dataclass(slots=True, eq=False)
class _Slot:
    """What happened in ``_SLOT_S`` seconds."""

    number: int
    started: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    ttft: Counter[int] = field(default_factory=Counter[int])
    itl: Counter[int] = field(default_factory=Counter[int])
    prompts_of: Counter[ReplicaId] = field(default_factory=Counter[ReplicaId])
    cached_of: Counter[ReplicaId] = field(default_factory=Counter[ReplicaId])

    def figures(self) -> Figures:
        return Figures(
            started=self.started,
            failed=self.failed,
            prompt_tokens=self.prompt_tokens,
            cached_tokens=self.cached_tokens,
            output_tokens=self.output_tokens,
            ttft=self.ttft,
            itl=self.itl,
        )


def _class_of(seconds: float) -> int:
    return round(math.log(seconds) / _GROWTH) if seconds > 1e-6 else -_MOST_CLASS


def _count(value: Any) -> int:
    if not isinstance(value, int) or not 0 <= value < 2**63:
        raise ValueError(f"{value!r:.40} is no count")
    return value


def _classes(wire: Any) -> dict[int, int]:
    if any(not isinstance(number, int) or abs(number) > _MOST_CLASS for number in wire):
        raise ValueError("latencies are told in classes of -150 to 150")
    return {number: _count(count) for number, count in wire.items()}
