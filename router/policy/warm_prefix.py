"""The default policy: the replica that costs the least time, all in seconds."""

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from .base import Candidate, Ranked, RoutingRequest
from .classic import LeastLoaded


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmPrefixWeights:
    """Tuned on public traces; a replica's prefill rate may be wrong by 3x without much harm."""

    prefill: float = 1.5
    """Extra weight of computing again what another replica holds: it also takes time from those that come later."""
    decode_harm: float = 0.05
    expected_output: float = 200.0
    """Tokens that a request is expected to generate."""
    kv_pressure_s: float = 3.0
    kv_threshold: float = 0.85
    slot_pressure_s: float = 3.0
    slot_threshold: float = 0.6


class WarmPrefix:
    """Cost = backlog + (1 + a) * prefill of the uncached tokens + harm to decodes + KV and batch-slot pressure."""

    name = "warm_prefix"

    def __init__(self, rng: Random, weights: WarmPrefixWeights | None = None) -> None:
        self._rng = rng
        self._weights = weights or WarmPrefixWeights()
        self._blind = LeastLoaded(rng)

    def choose(self, request: RoutingRequest, candidates: Sequence[Candidate]) -> list[Ranked]:
        """Cheapest first, equals in random order. Reasons: ``warm`` (no one holds more), ``load``, ``cold``.

        A prompt that is not known (no tokens) goes to the least loaded.
        """
        if not request.prompt_tokens:
            return self._blind.choose(request, candidates)
        warmest = max((candidate.cached_tokens for candidate in candidates), default=0)
        tie = self._rng.random
        costs = [(self.cost(request.prompt_tokens, candidate), tie(), candidate) for candidate in candidates]
        costs.sort(key=lambda item: item[:2])
        return [Ranked(candidate.replica, cost, _reason(candidate, warmest)) for cost, _, candidate in costs]

    def cost(self, prompt_tokens: int, candidate: Candidate) -> float:
        """Seconds that the request costs everyone if it goes there."""
        weights, load = self._weights, candidate.load
        rate, running = candidate.prefill_tokens_per_s, candidate.occupancy
        # The last prompt token is always computed: its logits give the first output.
        uncached = max(1, prompt_tokens - candidate.cached_tokens)
        backlog = max(candidate.backlog_s, load.waiting_tokens / rate)
        usage = min(1.0, load.kv_usage)
        step = candidate.decode_step_s * decode_slowdown(usage)
        step_after = candidate.decode_step_s * decode_slowdown(usage + prompt_tokens / candidate.kv_total_tokens)
        harm = step_after + running * (step_after - step)
        return (
            backlog
            + (1.0 + weights.prefill) * uncached / rate
            + weights.decode_harm * weights.expected_output * harm
            + weights.kv_pressure_s * max(0.0, usage - weights.kv_threshold)
            + weights.slot_pressure_s * max(0.0, running / load.max_num_seqs - weights.slot_threshold)
        )


def decode_slowdown(kv_usage: float) -> float:
    """How much longer a decode step takes with that share of the KV cache in use: the shape that Dynamo's mocker fits
    to vLLM, relative to an empty cache.
    """
    usage = min(1.0, kv_usage)
    return 1.0 + 9.41 * usage - 4.48 * usage * usage


def _reason(candidate: Candidate, warmest: int) -> str:
    if not warmest:
        return "cold"
    return "warm" if candidate.cached_tokens == warmest else "load"
