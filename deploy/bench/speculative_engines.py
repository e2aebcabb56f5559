"""Engines that differ only in how they draft, for ``bench speculative``."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

from ...actors.engine.config import EngineConfig
from ...actors.engine.engine import Engine
from ...actors.runner.load import KvMemoryConfig, load_runner
from ...cluster.errors import EngineError
from ...cluster.ids import RequestId
from ...cluster.messages import GenerateRequest, Load
from ...cluster.sampling_params import SamplingParams
from ...cluster.speculative_config import SpeculativeConfig
from ...kv_store.hashing import namespace_root
from .peers.warmroot_model import weights_format

_BLOCK_SIZE = 16
_LONGEST = 1024
"""Tokens of the longest prompt with its answer."""


@dataclass(frozen=True, slots=True)
class Run:
    """What one batch of requests gave."""

    outputs: list[list[int]]
    """Token ids, in the order of the prompts."""
    seconds: float

    @property
    def tokens_per_s(self) -> float:
        """Output tokens over the whole time, prompts included."""
        return sum(map(len, self.outputs)) / self.seconds


@dataclass(frozen=True, slots=True)
class Drafted:
    """What became of drafts since another moment."""

    drafts: int
    tokens: int
    accepted_by_place: tuple[int, ...]

    @classmethod
    def between(cls, before: Load, after: Load) -> "Drafted":
        """Of the requests that ran in between."""
        places = before.accepted_by_place + (0,) * (len(after.accepted_by_place) - len(before.accepted_by_place))
        return cls(
            after.num_drafts - before.num_drafts,
            after.num_draft_tokens - before.num_draft_tokens,
            tuple(late - early for late, early in zip(after.accepted_by_place, places, strict=True)),
        )

    def to_json(self) -> dict[str, Any]:
        """Shares: of drafted tokens, and of drafts up to each place."""
        accepted = sum(self.accepted_by_place)
        return {
            "drafts": self.drafts,
            "acceptance_rate": accepted / self.tokens if self.tokens else None,
            "accepted_per_draft": accepted / self.drafts if self.drafts else None,
            "accepted_by_place": [number / self.drafts for number in self.accepted_by_place] if self.drafts else [],
        }


class Drafting:
    """An engine over a model of its own; packed weights are the same pages of memory for all of them."""

    def __init__(
        self, name: str, path: Path, precision: str, speculation: SpeculativeConfig | None, *, streams: int
    ) -> None:
        """``streams`` is the most that run together. Raises ConfigError and ModelLoadError."""
        self.name = name
        dtype, quantization = weights_format(precision)
        runner = load_runner(
            path,
            dtype=dtype,
            quantization=quantization,
            kv=KvMemoryConfig(_BLOCK_SIZE, num_kv_blocks=1 + streams * _LONGEST // _BLOCK_SIZE),
            max_num_seqs=streams,
            speculation=speculation,
            draft_path=None if speculation is None or speculation.model is None else Path(speculation.model),
        )
        settings = EngineConfig(
            max_model_len=_LONGEST,
            max_num_seqs=streams,
            enable_prefix_caching=False,  # every round computes the same prompts
            eos_token_ids=runner.eos_token_ids,
            speculation=speculation,
        )
        self._engine = Engine(runner, settings, time.monotonic, namespace_root(name))
        self._ids = count()

    def load(self) -> Load:
        """With the counts of drafts."""
        return self._engine.load()

    def run(self, prompts: Sequence[Sequence[int]], params: SamplingParams) -> Run:
        """All prompts at once. Raises EngineError."""
        ids = [RequestId(f"{self.name}-{next(self._ids)}") for _ in prompts]
        outputs: dict[RequestId, list[int]] = {request_id: [] for request_id in ids}
        began = time.perf_counter()
        for request_id, prompt in zip(ids, prompts, strict=True):
            self._engine.add(GenerateRequest(request_id=request_id, prompt_token_ids=list(prompt), params=params))
        while self._engine.has_work:
            for delta in self._engine.step():
                if delta.error is not None:
                    raise EngineError(f"{self.name}: {delta.error}")
                outputs[delta.request_id] += delta.token_ids
            self._engine.drain_events()
        return Run(list(outputs.values()), time.perf_counter() - began)
