"""``warmroot bench routing --traces DIR --tune``: every rival at several settings of its own.

A rival is held against at its best, not only as it is shipped. What is tuned is tuned on the very cells that it is then
judged on, which flatters it.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from random import Random
from statistics import geometric_mean
from typing import Any

from ...router.policy import Policy, Scale
from ...router.policy.rivals.aibrix import Aibrix
from ...router.policy.rivals.cache_aware import CacheAware
from ...router.policy.rivals.dynamo import Dynamo, RouterQueue
from ...router.policy.rivals.llm_d import LlmD, Weights
from ...router.policy.rivals.preble import Preble
from ...router.policy.rivals.prefix_affinity import PrefixAffinity
from ..simulate.cluster import Setup
from ..simulate.scenario import setup_of
from ..simulate.trace import Trace
from .report import Report

OURS = "warm_prefix"
Make = Callable[[Random, Scale], Policy]

_DYNAMO: dict[str, dict[str, Any]] = {
    "scale 1": {},
    "scale 4": {"prefill_load_scale": 4.0},
    "scale 10": {"prefill_load_scale": 10.0},
    "scale 20": {"prefill_load_scale": 20.0},
    "scale 10, request weight 4": {"prefill_load_scale": 10.0, "request_weight": 4.0},
    "scale 4, queue 1 wspt": {"prefill_load_scale": 4.0, "queue": RouterQueue()},
    "scale 10, queue 1 wspt": {"prefill_load_scale": 10.0, "queue": RouterQueue()},
    "scale 10, queue 2 wspt": {"prefill_load_scale": 10.0, "queue": RouterQueue(threshold=2.0)},
    "scale 10, queue 1 fcfs": {"prefill_load_scale": 10.0, "queue": RouterQueue(policy="fcfs")},
}
_SGLANG: dict[str, dict[str, Any]] = {
    "0.3 / 64 / 1.5": {},
    "0.3 / 16 / 1.5": {"balance_abs_threshold": 16.0},
    "0.3 / 8 / 1.2": {"balance_abs_threshold": 8.0, "balance_rel_threshold": 1.2},
    "0.3 / 4 / 1.1": {"balance_abs_threshold": 4.0, "balance_rel_threshold": 1.1},
    "0.1 / 16 / 1.5": {"cache_threshold": 0.1, "balance_abs_threshold": 16.0},
    "0.5 / 32 / 1.0001": {"cache_threshold": 0.5, "balance_abs_threshold": 32.0, "balance_rel_threshold": 1.0001},
}
_RAY: dict[str, dict[str, Any]] = {
    "inf, 0.1": {},
    "40, 0.1": {"imbalanced_threshold": 40.0},
    "20, 0.1": {"imbalanced_threshold": 20.0},
    "10, 0.1": {"imbalanced_threshold": 10.0},
    "inf, 0.3": {"match_rate_threshold": 0.3},
}
_LLMD: dict[str, dict[str, Any]] = {
    "3:2:2": {},
    "3:2:2, approximate": {"precise": False},
    "3:1:1": {"weights": Weights(queue=1.0, kv=1.0)},
    "3:2:5": {"weights": Weights(kv=5.0)},
    "3:5:2": {"weights": Weights(queue=5.0)},
    "3:0:0, active 2": {"weights": Weights(queue=0.0, kv=0.0, active=2.0)},
    "3:2:2, active 2": {"weights": Weights(active=2.0)},
    "3:0:2, tokens 2": {"weights": Weights(queue=0.0, tokens=2.0)},
}
_PREBLE: dict[str, dict[str, Any]] = {
    "overload 2": {},
    "overload 1.2": {"overload": 1.2},
    "overload 1.5": {"overload": 1.5},
    "overload 4": {"overload": 4.0},
}
_AIBRIX: dict[str, dict[str, Any]] = {
    "8, 1": {},
    "16, 1": {"imbalance": 16},
    "32, 2": {"imbalance": 32, "deviations": 2.0},
}
FAMILIES: dict[str, tuple[Callable[..., Policy], dict[str, dict[str, Any]]]] = {
    "dynamo": (Dynamo, _DYNAMO),
    "sglang": (CacheAware, _SGLANG),
    "ray": (PrefixAffinity, _RAY),
    "llmd": (LlmD, _LLMD),
    "preble": (Preble, _PREBLE),
    "aibrix": (Aibrix, _AIBRIX),
}
"""A policy and its settings, what it is shipped with first."""


def names() -> list[str]:
    """``family: setting`` of all, after ours."""
    return [OURS, *(f"{family}: {setting}" for family, (_, settings) in FAMILIES.items() for setting in settings)]


def setup(name: str, replicas: int, trace: Trace, seed: int) -> Setup:
    """What to simulate for one of ``names``."""
    if name == OURS:
        return setup_of(OURS, replicas, trace, seed=seed)
    family, _, setting = name.partition(": ")
    make, settings = FAMILIES[family]
    scale = Scale(block_ids=1, tokens_per_id=trace.block_tokens)
    return replace(
        setup_of(family if family != "llmd" else "llmd_precise", replicas, trace, seed=seed),
        policy=partial(_make, make, settings[setting], scale),
    )


def _make(make: Callable[..., Policy], settings: dict[str, Any], scale: Scale, rng: Random) -> Policy:
    return make(rng, scale, **settings)


def tell(report: Report, rows: list[dict[str, Any]], most_load: float) -> None:
    """Ours over each setting, below saturation and above it, and the best of each family."""
    best: dict[str, dict[str, Any]] = {}
    lines: list[tuple[str, ...]] = []
    parts = {"below": [r for r in rows if r["load"] <= most_load], "above": [r for r in rows if r["load"] > most_load]}
    for family, (_, settings) in FAMILIES.items():
        ratios = {
            setting: {
                f"{column} {part}": _ratio(some, f"{family}: {setting}", f"{column}_s")
                for part, some in parts.items()
                if some
                for column in ("ttft_mean", "ttft_p90")
            }
            for setting in settings
        }
        lines += [
            (f"{family}: {setting}", *(f"{value:.2f}" for value in ratio.values())) for setting, ratio in ratios.items()
        ]
        best[family] = {"settings": ratios, **_best(ratios)}
    columns = list(next(iter(best["dynamo"]["settings"].values())))
    report.table("ours over theirs", ("", *columns), lines)
    report.result["tuned"] = best


def _best(ratios: dict[str, dict[str, float]]) -> dict[str, str]:
    columns = [name for name in next(iter(ratios.values())) if name.startswith("ttft_mean")]
    return {name: max(ratios, key=lambda setting: ratios[setting][name]) for name in columns}


def _ratio(rows: Iterable[dict[str, Any]], theirs: str, column: str) -> float:
    cells = {(row["trace"], row["replicas"], row["load"], row["policy"]): row[column] for row in rows}
    return geometric_mean(
        cells[trace, replicas, load, OURS] / value
        for (trace, replicas, load, policy), value in cells.items()
        if policy == theirs
    )
