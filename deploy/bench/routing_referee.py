"""``warmroot bench routing --traces DIR --referee``: our simulator beside the one that a rival ships.

``ai-dynamo-runtime`` replays traces offline, with its own engines and its real router. On the same traces its figures
and ours must agree: then what the simulator says of other policies can be believed.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from ...cluster.errors import ConfigError
from ..simulate.cluster import simulate
from ..simulate.costs import ReplicaCosts
from ..simulate.scenario import setup_of
from ..simulate.trace import Trace
from .report import Report

POLICIES: dict[str, dict[str, Any] | None] = {
    "round_robin": None,
    "dynamo": {},
    "dynamo10": {"prefill_load_scale": 10.0},
    "dynamo_wspt": {"prefill_load_scale": 4.0, "router_queue_threshold": 1.0, "router_queue_policy": "wspt"},
}
"""By our names: arguments of its ``KvRouterConfig``; None: not its KV router."""
FIGURES = {
    "hit_rate": ("prefix_cache_reused_ratio", 1.0),
    "ttft_mean_s": ("mean_ttft_ms", 1e-3),
    "ttft_p50_s": ("median_ttft_ms", 1e-3),
    "ttft_p90_s": ("p90_ttft_ms", 1e-3),
    "e2e_mean_s": ("mean_e2e_latency_ms", 1e-3),
}
"""By our names: its name, and its unit in ours."""
MOST_LOAD = 0.65
"""Above it replicas are saturated: small differences grow without end, in any simulator."""
_MOST_OFF = {"hit_rate": 0.02, "ttft_mean_s": 0.05, "e2e_mean_s": 0.05}


def is_installed() -> bool:
    """Whether the referee can be asked."""
    return find_spec("dynamo") is not None and find_spec("dynamo._core") is not None


def replay(trace: Trace, replicas: int, config: Mapping[str, Any] | None) -> dict[str, float]:
    """``FIGURES`` of its replay on so many of its vLLM-like engines. Raises ConfigError if it is not installed."""
    if not is_installed():
        raise ConfigError("--referee: ai-dynamo-runtime is missing: pip install ai-dynamo-runtime", param="referee")
    os.environ.setdefault("DYN_LOG", "error")  # it tells of every choice
    core, costs = import_module("dynamo._core"), ReplicaCosts()
    engine = {
        "block_size": trace.block_tokens,
        "num_gpu_blocks": costs.kv_tokens // trace.block_tokens,
        "max_num_seqs": costs.max_num_seqs,
        "max_num_batched_tokens": costs.max_num_batched_tokens,
    }
    with TemporaryDirectory() as folder:
        path = Path(folder) / "trace.jsonl"
        path.write_text("".join(map(_line, trace.requests)))
        result = core.run_mocker_trace_replay(
            [str(path)],
            extra_engine_args={"engine": engine},
            router_config=None if config is None else core.KvRouterConfig(**config),
            num_workers=replicas,
            router_mode="round_robin" if config is None else "kv_router",
            trace_block_size=trace.block_tokens,
        )
    return {name: result.summary[theirs] * unit for name, (theirs, unit) in FIGURES.items()}


@dataclass(frozen=True, slots=True)
class Verdict:
    """One cell by both. ``theirs`` and ``ours`` have ``FIGURES``."""

    trace: str
    replicas: int
    load: float
    policy: str
    theirs: dict[str, float]
    ours: dict[str, float]

    def off(self, figure: str) -> float:
        """Ours over theirs, less 1; of the hit rate, which is a share itself, ours less theirs."""
        ours, theirs = self.ours[figure], self.theirs[figure]
        return ours - theirs if figure == "hit_rate" else ours / max(1e-9, theirs) - 1.0


def judge(trace: Trace, name: str, replicas: int, load: float, seed: int) -> list[Verdict]:
    """Both on one trace that is scaled already, under each of ``POLICIES``."""
    verdicts: list[Verdict] = []
    for policy, config in POLICIES.items():
        summary = simulate(trace, setup_of(policy, replicas, trace, event_lag_s=0.0, seed=seed)).summary()
        ours = {figure: float(summary[figure]) for figure in FIGURES}
        verdicts.append(Verdict(name, replicas, load, policy, replay(trace, replicas, config), ours))
    return verdicts


def tell(report: Report, verdicts: list[Verdict]) -> None:
    """A table, and the bars: how far off the median cell and the worst one are."""
    rows = [
        (
            f"{v.trace} N={v.replicas} {v.load} {v.policy}",
            f"{v.theirs['hit_rate']:.3f} / {v.ours['hit_rate']:.3f}",
            *(f"{v.theirs[name] * 1e3:.0f} / {v.ours[name] * 1e3:.0f}" for name in FIGURES if name != "hit_rate"),
        )
        for v in verdicts
    ]
    report.table("its replay / ours", ("", "hit", "TTFT mean ms", "p50", "p90", "E2E mean"), rows)
    report.result["referee"] = [{**_row(v), "off": {name: v.off(name) for name in FIGURES}} for v in verdicts]
    below = [v for v in verdicts if v.load <= MOST_LOAD]
    for name, wanted in _MOST_OFF.items() if below else ():
        report.bar(f"{name}: median distance", median(abs(v.off(name)) for v in below), wanted, at_least=False)
        worst = max(below, key=lambda v: abs(v.off(name)))
        place = f"{worst.trace} N={worst.replicas} {worst.load} {worst.policy}"
        report.bar(f"{name}: worst, {place}", abs(worst.off(name)), wanted, at_least=False)


def _row(verdict: Verdict) -> dict[str, Any]:
    return {name: getattr(verdict, name) for name in ("trace", "replicas", "load", "policy", "theirs", "ours")}


def _line(request: Any) -> str:
    row = {
        "timestamp": request.arrival_s * 1e3,
        "input_length": request.input_tokens,
        "output_length": request.output_tokens,
        "hash_ids": request.block_ids,
    }
    return json.dumps(row) + "\n"
