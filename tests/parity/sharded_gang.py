"""Whole gangs under an engine, and a mixed load to compare them by."""

import time
from collections import deque
from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from warmroot.actors.engine.config import EngineConfig
from warmroot.actors.engine.executor import Executor
from warmroot.actors.engine.joint import start_engines
from warmroot.actors.engine.plan import SequenceStep, StepPlan, StepResult
from warmroot.actors.parallel.gang import start_gang
from warmroot.actors.parallel.gang_config import GangConfig
from warmroot.actors.parallel.spawn import RankProcesses
from warmroot.actors.runner.load import KvMemoryConfig, load_runner
from warmroot.cluster.ids import RequestId
from warmroot.cluster.kv_layout import KvLayout
from warmroot.cluster.messages import FinishReason, GenerateRequest, TokenDelta, TokenLogprob
from warmroot.cluster.sampling_params import SamplingParams
from warmroot.cluster.topology import Topology
from warmroot.kv_store.hashing import namespace_root

from .sharded_fork import PATIENCE_S, forked_ranks

VOCAB = 128
BLOCK_SIZE = 4
ROUNDING = 2e-4
"""Of log-probabilities in float32."""


@dataclass
class Watched:
    """An executor whose plans are looked at: a token that is still being sampled must not be asked for."""

    inner: Any
    plans: list[StepPlan] = field(default_factory=list)
    most_in_flight: int = 0
    _in_flight: deque[list[SequenceStep]] = field(default_factory=deque)

    @property
    def layout(self) -> KvLayout:
        return self.inner.layout

    @property
    def num_blocks(self) -> int:
        return self.inner.num_blocks

    @property
    def max_in_flight(self) -> int:
        return self.inner.max_in_flight

    @property
    def chains(self) -> bool:
        return self.inner.chains

    @property
    def num_groups(self) -> int:
        return getattr(self.inner, "num_groups", 1)

    def submit(self, plan: StepPlan) -> None:
        self._watch([plan])
        self.inner.submit(plan)

    def submit_all(self, plans: Sequence[StepPlan]) -> None:
        self._watch(plans)
        self.inner.submit_all(plans)

    def _watch(self, plans: Sequence[StepPlan]) -> None:
        steps = [step for plan in plans for step in plan.sequences]
        sampling = {step.request_id for earlier in self._in_flight for step in earlier if step.samples}
        assert self.chains or sampling.isdisjoint(step.request_id for step in steps)
        self.plans += plans
        self._in_flight.append(steps)
        self.most_in_flight = max(self.most_in_flight, len(self._in_flight))

    def result(self) -> StepResult:
        self._in_flight.popleft()
        return self.inner.result()

    def shutdown(self) -> None:
        self.inner.shutdown()

    @property
    def num_restarts(self) -> int:
        """How often a sequence came back after preemption."""
        ids = [new.request_id for plan in self.plans for new in plan.new]
        return len(ids) - len(set(ids))

    @property
    def num_chunks(self) -> int:
        """Parts of prompts that did not reach the end of theirs."""
        return sum(not step.samples for plan in self.plans for step in plan.sequences)


@dataclass
class Outcome:
    """What a request was given."""

    first: int = 0
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob | None] = field(default_factory=list)
    reason: FinishReason | None = None
    cached: int = 0


def random_tokens(seed: int, length: int) -> list[int]:
    return torch.randint(4, VOCAB, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


SHARED = random_tokens(0, 24)
LOAD: dict[str, tuple[list[int], dict]] = {
    "whole shared prefix": (SHARED, {}),
    "its first part": (SHARED[:13], {}),
    "shared and own": (SHARED + random_tokens(1, 6), {"logprobs": 2}),
    "long": (random_tokens(2, 50), {}),
    "prompt logprobs": (SHARED[:11] + random_tokens(3, 9), {"prompt_logprobs": 1}),
    "drawn": (random_tokens(4, 9), {"temperature": 1.0, "seed": 11, "top_p": 0.9}),
    "second choice": (random_tokens(4, 9), {"temperature": 0.7, "seed": 12, "top_k": 20, "min_p": 0.01}),
    "penalties": (
        random_tokens(5, 14),
        {"presence_penalty": 0.5, "frequency_penalty": 0.5, "repetition_penalty": 1.1},
    ),
    "bias": (random_tokens(6, 5), {"temperature": 1.0, "seed": 13, "logit_bias": {7: 4.0, 9: -100.0}, "logprobs": 0}),
    "allowed": (random_tokens(6, 7), {"allowed_token_ids": tuple(range(30, 70)), "bad_words_token_ids": ((40, 41),)}),
    "stop": (
        random_tokens(7, 8),
        {"temperature": 1.0, "seed": 14, "stop_token_ids": tuple(range(40, 80)), "min_tokens": 3, "ignore_eos": False},
    ),
    "one token": ([5], {}),
    "one to come": (random_tokens(8, 17), {"max_tokens": 1}),
    "nothing to come": (random_tokens(9, 17), {"max_tokens": 0, "prompt_logprobs": 0}),
    "resumed": (SHARED[:10], {"frequency_penalty": 0.3}),
    "another tenant": (SHARED, {}),
}
ABORTED_AFTER = {"leaves at once": 0, "leaves early": 1, "leaves late": 6}
"""Requests whose clients leave when they have had so many tokens: the first while its prompt is being computed."""


def load() -> list[GenerateRequest]:
    """Shared prefixes, chunks, draws, penalties, ends that nobody foresees, and clients that leave."""
    leaving = {name: (random_tokens(20 + after, 33 - 5 * after), {}) for name, after in ABORTED_AFTER.items()}
    return [
        GenerateRequest(
            request_id=RequestId(name),
            prompt_token_ids=prompt,
            params=SamplingParams(**{"temperature": 0.0, "max_tokens": 14, "ignore_eos": True} | params),
            output_token_ids=random_tokens(30, 5) if name == "resumed" else [],
            cache_salt=name if name == "another tenant" else "",
        )
        for name, (prompt, params) in (LOAD | leaving).items()
    ]


class Served:
    """An engine that stays: a second load finds the cache of the first."""

    def __init__(self, executor: Executor, *, clients_leave: bool = True, **options) -> None:
        self.clients_leave = clients_leave
        config = {"max_model_len": 100, "max_num_seqs": 8, "max_num_batched_tokens": 16} | options
        self.executor = Watched(executor)
        self.engine = start_engines(self.executor, EngineConfig(**config), time.monotonic, namespace_root("test"))

    def run(self, requests: Sequence[GenerateRequest]) -> dict[str, Outcome]:
        """All of them, as many steps in flight as the executor makes use of."""
        engine = self.engine
        found = {request.request_id: Outcome(len(request.output_token_ids)) for request in requests}
        for request in requests:
            engine.add(request)
        while engine.has_work:
            for delta in engine.end(self.executor.result()) if engine.begin_all() else engine.take_pending():
                assert delta.error is None, delta.error
                _take(found[delta.request_id], delta)
            for name, after in ABORTED_AFTER.items() if self.clients_leave else ():
                if name in found and len(found[name].tokens) >= after:
                    engine.abort(RequestId(name))
        assert engine.load().kv_used_blocks == 0
        return found


@contextmanager
def served_by_gang(
    path: Path,
    topology: Topology,
    num_blocks: int | None,
    *,
    block_size: int = BLOCK_SIZE,
    kv_cache_memory: int | None = None,
    dtype: str = "float32",
    quantization: str = "none",
    kv_cache_dtype: str = "auto",
    num_redundant_experts: int = 0,
    draft_path: Path | None = None,
    **options,
):
    """``Served`` over processes; ``options`` are the engine's."""
    config = GangConfig(
        path=path,
        topology=topology,
        kv=KvMemoryConfig(block_size, kv_cache_dtype, num_blocks, kv_cache_memory),
        threads_per_rank=1,
        dtype=dtype,
        quantization=quantization,
        num_redundant_experts=num_redundant_experts,
        speculation=options.get("speculation"),
        draft_path=draft_path,
        step_s=PATIENCE_S,
    )
    with forked_ranks():
        executor = start_gang(RankProcesses(config), silence_s=PATIENCE_S)
    try:
        yield Served(executor, **options)
    finally:
        executor.shutdown()


def served_by_one(
    path: Path, *, dtype: str = "float32", quantization: str = "none", kv_cache_dtype: str = "auto", **options
) -> Served:
    """By one process that has pages for all and computes every prompt at once, and whose clients are patient."""
    kv = KvMemoryConfig(block_size=BLOCK_SIZE, num_kv_blocks=1000, kv_cache_dtype=kv_cache_dtype)
    runner = load_runner(path, dtype=dtype, quantization=quantization, kv=kv)
    return Served(runner, clients_leave=False, **{"max_num_batched_tokens": 1000, "max_num_seqs": 64} | options)


def _take(outcome: Outcome, delta: TokenDelta) -> None:
    assert delta.index == outcome.first + len(outcome.tokens)
    assert outcome.reason is None
    outcome.tokens += delta.token_ids
    outcome.logprobs += delta.logprobs or []
    outcome.prompt_logprobs += delta.prompt_logprobs or []
    outcome.reason = delta.finish_reason
    outcome.cached += delta.cached_tokens or 0


def assert_equal(found: dict[str, Outcome], expected: dict[str, Outcome], *, atol: float = ROUNDING) -> None:
    """Tokens and ends to the letter, log-probabilities but for rounding. Who has left has a part of the expected."""
    for name in found.keys() & ABORTED_AFTER.keys():
        tokens = found[name].tokens
        assert (expected[name].tokens[: len(tokens)], found[name].reason) == (tokens, None)
    whole = found.keys() - ABORTED_AFTER.keys()
    assert {name: found[name].tokens for name in whole} == {name: expected[name].tokens for name in whole}
    assert {name: found[name].reason for name in whole} == {name: expected[name].reason for name in whole}
    for name in whole:
        _assert_near(found[name].logprobs, expected[name].logprobs, atol)
        _assert_near(found[name].prompt_logprobs, expected[name].prompt_logprobs, atol)


def _assert_near(found: Sequence[TokenLogprob | None], expected: Sequence[TokenLogprob | None], atol: float) -> None:
    for mine, theirs in zip(found, expected, strict=True):
        if mine is None or theirs is None:
            assert mine is theirs
            continue
        assert (mine.token_id, mine.rank) == (theirs.token_id, theirs.rank)
        assert [token for token, _ in mine.top] == [token for token, _ in theirs.top]
        pairs = [(mine.logprob, theirs.logprob), *((a[1], b[1]) for a, b in zip(mine.top, theirs.top, strict=True))]
        assert all(abs(a - b) <= atol for a, b in pairs)
