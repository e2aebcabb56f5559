"""Warmroot's engine over a gang of ranks on this machine, or over none, stepped in process like ``warmroot_peer``."""

import atexit
import itertools
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ....actors.engine.config import EngineConfig
from ....actors.engine.engine import Engine
from ....actors.engine.joint import JointEngine, start_engines
from ....actors.parallel.gang import GangExecutor, start_gang
from ....actors.parallel.gang_config import GangConfig
from ....actors.parallel.spawn import RankProcesses
from ....actors.runner.load import KvMemoryConfig
from ....cluster.errors import EngineError
from ....cluster.ids import BlockHash, RequestId
from ....cluster.messages import GenerateRequest, TokenDelta
from ....cluster.parallel_layout import ParallelLayout
from ....cluster.sampling_params import SamplingParams
from ....cluster.topology import Topology
from .executor_clock import ExecutorClock
from .predicted_bytes import ACTIVATION_BYTES, predicted_bytes
from .protocol import Job, News, serve
from .warmroot_model import load, weights_format

_WARM_UP_STEPS = 8
_STEP_S = 300.0
"""Deadline of a step: others may use the machine."""


class GangBackend:
    """Settings: those of ``warmroot_model.load`` with ``threads`` of each rank, and ``topology``; None: no gang."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self._gang: GangExecutor | None = None
        self._layout: ParallelLayout | None = None
        inner = load(settings) if settings["topology"] is None else self._start(settings)
        config = EngineConfig(
            max_model_len=settings["max_model_len"],
            max_num_seqs=settings["max_num_seqs"],
            enable_prefix_caching=False,
        )
        self._executor = ExecutorClock(inner)
        self._engine = start_engines(self._executor, config, time.monotonic, BlockHash(bytes(16)))
        self._ids = itertools.count()
        self._index: dict[RequestId, int] = {}
        reports = [] if self._gang is None else self._gang.reports
        self.facts: dict[str, Any] = {
            "topology": settings["topology"],
            "threads_per_rank": settings["threads"],
            "weights": reports[0].weights_format if reports else None,
            "num_kv_blocks": inner.num_blocks,
            "rank_memory_bytes": [report.peak_memory_bytes for report in reports],
        }

    def _start(self, settings: dict[str, Any]) -> GangExecutor:
        dtype, quantization = weights_format(settings["precision"])
        config = GangConfig(
            path=Path(settings["model"]),
            topology=Topology(**settings["topology"]),
            kv=KvMemoryConfig(num_kv_blocks=settings["num_kv_blocks"]),
            threads_per_rank=settings["threads"],
            dtype=dtype,
            quantization=quantization,
            max_model_len=settings["max_model_len"],
            max_num_seqs=settings["max_num_seqs"],
            step_s=_STEP_S,
        )
        self._layout = config.layout()
        self._gang = start_gang(RankProcesses(config))
        return self._gang

    def select(self, variant: str) -> None:
        """There is one."""

    def reset(self) -> None:
        """Nothing is cached."""

    def add(self, index: int, job: Job) -> None:
        """Queue a request."""
        self._index[self._add(job.prompt, job.max_tokens)] = index

    def step(self) -> Iterable[News]:
        """One engine step."""
        deltas = _stepped(self._engine)
        return [News(self._index[delta.request_id], len(delta.token_ids), delta.cached_tokens) for delta in deltas]

    def decode(self, prompts: list[list[int]], num_steps: int) -> dict[str, Any]:
        """What steps cost while these prompts decode: ``num_steps`` results are awaited, after a few to warm up."""
        self._executor.plans.clear()
        start = self._times()
        ids = [self._add(prompt, 2 * (num_steps + _WARM_UP_STEPS) + 64) for prompt in prompts]
        first = set(ids)
        while first:
            first -= {delta.request_id for delta in _stepped(self._engine)}
        for _ in range(_WARM_UP_STEPS):
            _stepped(self._engine)
        before, executor_s, began = self._times(), self._executor.seconds, time.perf_counter()
        tokens = [sum(len(delta.token_ids) for delta in _stepped(self._engine)) for _ in range(num_steps)]
        wall_s = time.perf_counter() - began
        executor_s, after = self._executor.seconds - executor_s, self._times()
        for request_id in ids:
            self._engine.abort(request_id)
        while self._engine.has_work:
            _stepped(self._engine)
        return {
            "wall_s": wall_s,
            "num_steps": num_steps,
            "num_tokens": sum(tokens),
            "engine_s": wall_s - executor_s,
            "ranks": [_seconds(*pair) for pair in zip(before, after, strict=True)],
            "traffic": self._traffic(start, self._times()),
        }

    def close(self) -> None:
        """End the ranks."""
        self._executor.shutdown()

    def _times(self) -> list[dict[str, Any]]:
        return [] if self._gang is None else [asdict(times) for times in self._gang.times()]

    def _traffic(self, before: list[dict[str, Any]], after: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Of each rank, by kind: bytes that were counted, and those that the layout says."""
        if self._layout is None:
            return []
        predicted = predicted_bytes(self._layout, self._executor.plans, ACTIVATION_BYTES)
        return [
            {
                "counted": {kind: n - old["num_bytes"].get(kind, 0) for kind, n in new["num_bytes"].items()},
                "predicted": foreseen,
            }
            for old, new, foreseen in zip(before, after, predicted, strict=True)
        ]

    def _add(self, prompt: list[int], max_tokens: int) -> RequestId:
        request_id = RequestId(f"bench-{next(self._ids)}")
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, seed=0)
        self._engine.add(GenerateRequest(request_id=request_id, prompt_token_ids=prompt, params=params))
        return request_id


def _stepped(engine: Engine | JointEngine) -> list[TokenDelta]:
    deltas = engine.step()
    for delta in deltas:
        if delta.finish_reason is not None and delta.finish_reason.is_failure:
            raise EngineError(delta.error or "the engine failed")
    return deltas


def _seconds(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, float]:
    return {name: after[name] - before[name] for name in after if name.endswith("_s")}


def _build(settings: dict[str, Any]) -> GangBackend:
    backend = GangBackend(settings)
    atexit.register(backend.close)
    return backend


if __name__ == "__main__":
    serve(_build)
