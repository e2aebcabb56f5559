"""Warmroot's own engine, stepped in process: no Ray, no router, no detokenizer.

Two engines share one runner and differ in ``enable_prefix_caching``: variants ``cached`` (the default) and
``uncached``. They take turns on the same pages, so a variant's cache holds nothing of value after the other has run:
reset it, or ask for prompts that it has never seen.
"""

import itertools
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from ....actors.engine.config import EngineConfig
from ....actors.engine.engine import Engine
from ....actors.runner.load import KvMemoryConfig, load_runner
from ....cluster.errors import EngineError
from ....cluster.ids import BlockHash, RequestId
from ....cluster.messages import FinishReason, GenerateRequest
from ....cluster.sampling_params import SamplingParams
from .protocol import Job, News, serve

_DTYPES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16", "auto": "auto"}


class WarmrootBackend:
    """Settings: ``model``, ``dtype``, ``threads``, ``max_model_len``, ``max_num_seqs``, ``num_kv_blocks``."""

    def __init__(self, settings: dict[str, Any]) -> None:
        torch.set_num_threads(settings["threads"])
        runner = load_runner(
            Path(settings["model"]),
            dtype=_DTYPES[settings["dtype"]],
            kv=KvMemoryConfig(num_kv_blocks=settings["num_kv_blocks"]),
            max_model_len=settings["max_model_len"],
            max_num_seqs=settings["max_num_seqs"],
        )

        def engine(prefix_caching: bool) -> Engine:
            config = EngineConfig(
                max_model_len=settings["max_model_len"],
                max_num_seqs=settings["max_num_seqs"],
                enable_prefix_caching=prefix_caching,
                eos_token_ids=runner.eos_token_ids,
            )
            return Engine(runner, config, time.monotonic, BlockHash(bytes(16)))

        self._engines = {"cached": engine(True), "uncached": engine(False)}
        self._engine = self._engines["cached"]
        self._ids = itertools.count()
        self._index: dict[RequestId, int] = {}
        self.facts = {
            "torch": torch.__version__,
            "dtype": settings["dtype"],
            "kv_dtype": str(runner.kv_dtype).removeprefix("torch."),
            "threads": torch.get_num_threads(),
            "num_kv_blocks": runner.num_blocks,
            "driver": "Engine.step",
        }

    def select(self, variant: str) -> None:
        """With the prefix cache or without."""
        self._engine = self._engines["cached" if variant == "default" else variant]

    def reset(self) -> None:
        """Forget cached prefixes."""
        self._engine.clear_cache()
        self._engine.drain_events()

    def add(self, index: int, job: Job) -> None:
        """Queue a request."""
        request_id = RequestId(f"bench-{next(self._ids)}")
        self._index[request_id] = index
        params = SamplingParams(temperature=0.0, max_tokens=job.max_tokens, ignore_eos=True, seed=0)
        self._engine.add(GenerateRequest(request_id=request_id, prompt_token_ids=job.prompt, params=params))

    def step(self) -> Iterable[News]:
        """One engine step, with the events that a router would be sent."""
        deltas = self._engine.step()
        self._engine.drain_events()
        news: list[News] = []
        for delta in deltas:
            if delta.finish_reason is FinishReason.ERROR:
                raise EngineError(delta.error or "the engine failed")
            news.append(News(self._index[delta.request_id], len(delta.token_ids), delta.cached_tokens))
        return news


if __name__ == "__main__":
    serve(WarmrootBackend)
