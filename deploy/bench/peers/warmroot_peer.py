"""Warmroot's own engine, stepped in process: no Ray, no router, no detokenizer.

Two engines share one runner and differ in ``enable_prefix_caching``: variants ``cached`` (the default) and
``uncached``. They take turns on the same pages, so a variant's cache holds nothing of value after the other has run:
reset it, or ask for prompts that it has never seen.
"""

import itertools
import time
from collections.abc import Iterable
from typing import Any

from ....actors.engine.config import EngineConfig
from ....actors.engine.engine import Engine
from ....cluster.errors import EngineError
from ....cluster.ids import BlockHash, RequestId
from ....cluster.messages import GenerateRequest, TokenDelta
from ....cluster.sampling_params import SamplingParams
from .protocol import Job, News, serve
from .step_cost import measure_steps
from .warmroot_model import facts, load


class WarmrootBackend:
    """See ``warmroot_model.load`` for the settings."""

    def __init__(self, settings: dict[str, Any]) -> None:
        began = time.monotonic()
        runner = load(settings)
        load_s = time.monotonic() - began

        def engine(prefix_caching: bool) -> Engine:
            config = EngineConfig(
                max_model_len=settings["max_model_len"],
                max_num_seqs=settings["max_num_seqs"],
                enable_prefix_caching=prefix_caching,
                eos_token_ids=runner.eos_token_ids,
            )
            return Engine(runner, config, time.monotonic, BlockHash(bytes(16)))

        self._runner = runner
        self._engines = {"cached": engine(True), "uncached": engine(False)}
        self._engine = self._engines["cached"]
        self._ids = itertools.count()
        self._index: dict[RequestId, int] = {}
        self.facts = {**facts(settings, runner), "load_s": load_s, "driver": "Engine.step"}

    def select(self, variant: str) -> None:
        """With the prefix cache or without."""
        self._engine = self._engines["cached" if variant == "default" else variant]

    def reset(self) -> None:
        """Forget cached prefixes."""
        self._engine.clear_cache()
        self._engine.drain_events()

    def add(self, index: int, job: Job) -> None:
        """Queue a request."""
        params = SamplingParams(temperature=0.0, max_tokens=job.max_tokens, ignore_eos=True, seed=0)
        self._index[self._add(self._engine, job.prompt, params)] = index

    def step(self) -> Iterable[News]:
        """One engine step, with the events that a router would be sent."""
        deltas = _stepped(self._engine)
        return [News(self._index[delta.request_id], len(delta.token_ids), delta.cached_tokens) for delta in deltas]

    def score(self, prompt: list[int]) -> dict[str, Any]:
        """Of each token but the first, after those before it: see ``quality.Scores``."""
        engine = self._engines["uncached"]
        self._add(engine, prompt, SamplingParams(temperature=0.0, max_tokens=0, prompt_logprobs=2, seed=0))
        found = [entry for delta in _until_done(engine) for entry in delta.prompt_logprobs or () if entry is not None]
        return {
            "logprobs": [entry.logprob for entry in found],
            "argmax": [entry.top[0][0] for entry in found],
            "margins": [entry.top[0][1] - entry.top[1][1] for entry in found],
        }

    def step_cost(self, prompts: list[list[int]], num_steps: int) -> dict[str, Any]:
        """What a step costs while these prompts decode; see ``measure_steps``."""
        engine = self._engines["cached"]
        params = SamplingParams(temperature=0.0, max_tokens=2 * num_steps + len(prompts) + 64, ignore_eos=True, seed=0)
        ids = [self._add(engine, prompt, params) for prompt in prompts]
        first = set(ids)
        while first:
            first -= {delta.request_id for delta in _stepped(engine)}
        result = measure_steps(engine, self._runner, num_steps)
        for request_id in ids:
            engine.abort(request_id)
        return result

    def _add(self, engine: Engine, prompt: list[int], params: SamplingParams) -> RequestId:
        request_id = RequestId(f"bench-{next(self._ids)}")
        engine.add(GenerateRequest(request_id=request_id, prompt_token_ids=prompt, params=params))
        return request_id


def _stepped(engine: Engine) -> list[TokenDelta]:
    deltas = engine.step()
    engine.drain_events()
    for delta in deltas:
        if delta.finish_reason is not None and delta.finish_reason.is_failure:
            raise EngineError(delta.error or "the engine failed")
    return deltas


def _until_done(engine: Engine) -> Iterable[TokenDelta]:
    while engine.has_work:
        yield from _stepped(engine)


if __name__ == "__main__":
    serve(WarmrootBackend)
