"""The bars that ``bench engine`` holds against peers, as data: who against whom, and by how much."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from .lineup import Entry

Ratios = Mapping[str, Mapping[str, Mapping[str, float]]]
"""[contender][other][figure], medians over the rounds."""


class Verdict(NamedTuple):
    """A figure and its bound, as ``Report.bar`` takes them."""

    name: str
    value: float
    wanted: float
    at_least: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """Output tokens/s of the first of ours that ``ours`` accepts, over the best peer that ``rival`` accepts."""

    ours: Callable[[Entry], bool]
    rivals: str
    """For the report."""
    rival: Callable[[Entry, Entry], bool]
    single: float | None = None
    """Least ratio of a single stream; None: nothing is asked."""
    batched: float | None = None
    """Least ratio of several streams."""


def same_class(ours: Entry, peer: Entry) -> bool:
    """Precisions that are comparable: of 4-bit files only the same type is."""
    return peer.precision == ours.precision if ours.bits < 8 else peer.bits == ours.bits


def _is(*precisions: str) -> Callable[[Entry], bool]:
    return lambda entry: entry.precision in precisions


def _llama_cpp(ours: Entry, peer: Entry) -> bool:
    return peer.engine == "llama.cpp" and same_class(ours, peer)


def _from(engine: str) -> Callable[[Entry, Entry], bool]:
    return lambda ours, peer: peer.engine == engine


def _any(*entries: Entry) -> bool:
    return True


_HALF = _is("fp16", "bf16")

STREAM_RULES = (
    Rule(ours=_any, rivals="transformers", rival=_from("transformers"), single=1.0, batched=1.0),
    Rule(ours=_HALF, rivals="vllm", rival=_from("vllm"), single=1.3, batched=1.3),
    Rule(ours=_HALF, rivals="llama.cpp 16-bit", rival=_llama_cpp, single=1.0, batched=1.3),
    Rule(ours=_is("int8"), rivals="llama.cpp 8-bit", rival=_llama_cpp, single=1.1),
    Rule(ours=_is("int8"), rivals="best peer", rival=_any, batched=1.6),
    Rule(ours=_is("q4_0"), rivals="llama.cpp q4_0", rival=_llama_cpp, single=1.0, batched=1.3),
    Rule(ours=_is("q4_1"), rivals="llama.cpp q4_1", rival=_llama_cpp, single=1.0, batched=1.3),
)

MAX_TTFT = 1.0
MIN_SHARED_PREFIX = 1.3


def stream_bars(entries: Sequence[Entry], concurrency: int, ratios: Ratios) -> Iterator[Verdict]:
    """What a heat's contenders have to reach at one concurrency; nothing where no rival takes part."""
    for rule in STREAM_RULES:
        wanted = rule.single if concurrency == 1 else rule.batched
        ours = next((entry for entry in entries if entry.is_ours and rule.ours(entry)), None)
        if wanted is None or ours is None:
            continue
        rivals = _rivals(ours, entries, rule.rival)
        if rivals:
            value = min(ratios[ours.name][rival]["output"] for rival in rivals)
            yield Verdict(f"{ours.name} / {rule.rivals}, {_streams(concurrency)}", value, wanted)


def ttft_bars(entries: Sequence[Entry], ratios: Ratios) -> Iterator[Verdict]:
    """TTFT of ours over that of the best comparable peer."""
    for ours in (entry for entry in entries if entry.is_ours):
        rivals = _rivals(ours, entries, same_class)
        if rivals:
            value = max(ratios[ours.name][rival]["ttft"] for rival in rivals)
            yield Verdict(f"{ours.name}: TTFT / best peer's", value, MAX_TTFT, at_least=False)


def shared_prefix_bars(ours: Entry, ratios: Mapping[str, float]) -> Iterator[Verdict]:
    """Speed on a shared prefix over that of the peers that cache it, [peer] -> ratio."""
    if _HALF(ours) and ratios:
        yield Verdict(f"{ours.name} / vllm, shared prefix", min(ratios.values()), MIN_SHARED_PREFIX)


def _rivals(ours: Entry, entries: Sequence[Entry], accepts: Callable[[Entry, Entry], bool]) -> list[str]:
    return [peer.name for peer in entries if not peer.is_ours and accepts(ours, peer)]


def _streams(concurrency: int) -> str:
    return "single stream" if concurrency == 1 else f"{concurrency} streams"
