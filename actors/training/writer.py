"""The model writes its own texts: prompts, then answers to them.

An instruct model that is given only the opening of a user's turn goes on with what a user would say (Xu et al.,
"Magpie", arXiv 2406.08464). So what drafts learn from is what they will have to guess: this model's own words.
"""

import time
from collections.abc import Iterator
from itertools import count

from ...cluster.ids import RequestId
from ...cluster.messages import FinishReason, GenerateRequest, TokenDelta
from ...cluster.model_spec import ModelSpec
from ...cluster.sampling_params import SamplingParams
from ...kv_store.hashing import namespace_root
from ..engine.config import EngineConfig
from ..engine.engine import Engine
from ..engine.executor import Executor
from .corpus import Text, Turns

_PROMPT = {"temperature": 1.0, "top_p": 0.95, "max_tokens": 128}
_TEMPERATURES = (0.0, 0.7, 1.0, 0.7)
"""Of answers, in turn: what people ask for."""


class Writer:
    """Keeps ``streams`` texts under way at a time, so that every step is full."""

    def __init__(
        self, executor: Executor, spec: ModelSpec, turns: Turns, *, streams: int, max_tokens: int, seed: int
    ) -> None:
        """``max_tokens`` is the longest answer."""
        settings = EngineConfig(
            max_model_len=spec.max_position,
            max_num_seqs=streams,
            max_num_batched_tokens=max(2048, streams),
            eos_token_ids=spec.eos_token_ids,
        )
        self._engine = Engine(executor, settings, time.monotonic, namespace_root("texts", "", "", "", ""))
        self._ends = frozenset(spec.eos_token_ids)
        self._turns = turns
        self._streams = streams
        self._max_tokens = max_tokens
        self._seeds = count(seed)
        self._answering: dict[RequestId, list[int]] = {}
        """Prompts of the answers that are under way."""
        self._asking = 0
        self._written: dict[RequestId, list[int]] = {}

    def answers(self, prompts: Iterator[list[int]]) -> Iterator[Text]:
        """Answers to the prompts, in any order, until there are none left."""
        while True:
            while len(self._answering) < self._streams and (prompt := next(prompts, None)) is not None:
                self._answer(prompt)
            if not self._answering:
                return
            yield from self._step()

    def conversations(self) -> Iterator[Text]:
        """Prompts and answers of its own, without end; texts of its own where there are no turns."""
        while True:
            while self._asking + len(self._answering) < self._streams:
                if self._turns.closing:
                    self._ask()
                else:
                    self._answer(self._turns.opening)
            yield from self._step()

    def _ask(self) -> None:
        self._asking += 1
        self._add(self._turns.opening, SamplingParams(**_PROMPT, seed=next(self._seeds)))

    def _answer(self, prompt: list[int]) -> None:
        seed = next(self._seeds)
        temperature = _TEMPERATURES[seed % len(_TEMPERATURES)]
        params = SamplingParams(temperature=temperature, max_tokens=self._max_tokens, seed=seed)
        self._answering[self._add(prompt, params)] = prompt

    def _add(self, prompt: list[int], params: SamplingParams) -> RequestId:
        request_id = RequestId(str(params.seed))
        self._written[request_id] = []
        self._engine.add(GenerateRequest(request_id=request_id, prompt_token_ids=prompt, params=params))
        return request_id

    def _step(self) -> Iterator[Text]:
        for delta in self._engine.step():
            self._written[delta.request_id] += delta.token_ids
            if delta.finish_reason is not None:
                yield from self._finished(delta)
        self._engine.drain_events()

    def _finished(self, delta: TokenDelta) -> Iterator[Text]:
        written = self._written.pop(delta.request_id)
        prompt = self._answering.pop(delta.request_id, None)
        if prompt is not None:
            yield Text(prompt + written, len(prompt))
            return
        self._asking -= 1
        said = [token_id for token_id in written if token_id not in self._ends]
        if delta.finish_reason is FinishReason.STOP and said:
            self._answer(self._turns.prompt(said))
