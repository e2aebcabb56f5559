"""Offline generation: one engine of this process, without Ray."""

import asyncio
import random
from collections.abc import AsyncGenerator, Sequence
from types import TracebackType
from typing import Any, cast

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TextColumn, TimeElapsedColumn
from rich.text import Text

from ..actors.engine_host import EngineHost
from ..actors.local_engine import LocalGenerator
from ..cluster.config import (
    CacheConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    SpeculationConfig,
    WarmrootConfig,
)
from ..cluster.errors import ConfigError, EngineError, InvalidRequestError
from ..cluster.messages import GenerateRequest, TokenDelta
from ..cluster.sampling_params import SamplingParams
from ..router.chat_template import Message
from ..router.frontend import Frontend
from ..router.generator import TokenGenerator
from ..router.output import RequestOutput
from .background_loop import BackgroundLoop

Prompt = str | Sequence[int]
"""A text, or token ids."""
Params = SamplingParams | Sequence[SamplingParams] | None

_UNBOUNDED = 2**31 - 1


class LLM:
    """A model to generate with, batch by batch; a context manager that frees its memory.

    >>> with LLM("smollm2") as llm:
    ...     outputs = llm.generate(["The capital of France is"], SamplingParams(max_tokens=8, temperature=0))
    """

    def __init__(self, model: str, *, num_threads: int | None = None, progress: bool = True, **keys: Any) -> None:
        """``model`` is a folder, GGUF file, hub id or smollm2; ``num_threads`` are CPU threads that compute.

        ``keys`` are those of ModelConfig, ParallelConfig, CacheConfig and SchedulerConfig: ``dtype``,
        ``quantization``, ``max_model_len``, ``seed``, ``tensor_parallel_size``, ``pipeline_parallel_size``,
        ``max_num_seqs``, ``block_size``, ``num_kv_blocks``, ``enable_prefix_caching`` and so on. A model that is cut
        over several ranks runs in as many child processes.
        ``progress=False`` draws no bars.
        Raises ConfigError, ModelLoadError and RankLostError.
        """
        config = _config(model, num_threads, keys)
        self._console = Console(stderr=True)
        self._shows = progress and self._console.is_terminal
        host = self._load(config)
        self._loop = BackgroundLoop("warmroot-llm")
        self._generator = LocalGenerator(host.start, self._loop.loop)
        self._meter = _Meter(self._generator)
        draws: random.Random = random.SystemRandom() if config.model.seed is None else random.Random(config.model.seed)
        self._frontend = Frontend(
            self._meter,
            host.tokenizer,
            model=config.model.names[0],
            max_model_len=min(host.max_model_len, self._generator.engine.max_tokens),
            vocab_size=host.model.spec.vocab_size,
            new_seed=lambda: draws.getrandbits(63),
            tool_call_parser=config.model.tool_call_parser,
        )

    @property
    def frontend(self) -> Frontend:
        """Tokenizer and chat template of the model."""
        return self._frontend

    def generate(self, prompts: Prompt | Sequence[Prompt], params: Params = None) -> list[RequestOutput]:
        """Outputs in the order of the prompts, all of them batched together.

        ``params`` are one for all or one for each. Raises InvalidRequestError before anything runs, EngineError.
        """
        token_ids = [self._frontend.tokenize(p if isinstance(p, str) else list(p)) for p in _prompts(prompts)]
        return self._run(token_ids, params)

    def chat(
        self, messages: Sequence[Message] | Sequence[Sequence[Message]], params: Params = None, **options: Any
    ) -> list[RequestOutput]:
        """Answers to one conversation or several; ``options`` are those of ``Frontend.render``, such as ``tools``."""
        return self._run([self._frontend.render(list(c), **options) for c in _conversations(messages)], params)

    def close(self) -> None:
        """End the engine and free its memory. Idempotent."""
        self._generator.close()
        self._loop.close()

    def __enter__(self) -> "LLM":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _load(self, config: WarmrootConfig) -> EngineHost:
        with Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=30),
            TimeElapsedColumn(),
            console=self._console,
            transient=True,
            disable=not self._shows,
        ) as progress:
            task = progress.add_task(config.model.model, total=None)
            return EngineHost.load(
                config,
                lambda stage, done, total: progress.update(
                    task, description=f"{config.model.model}: {stage}", completed=done, total=total or None
                ),
            )

    def _run(self, token_ids: list[list[int]], params: Params) -> list[RequestOutput]:
        if self._loop.loop.is_closed():
            raise EngineError("this LLM is closed")
        each = _params(params, len(token_ids))
        with Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=30),
            MofNCompleteColumn(),
            _TokenRate(self._meter),
            TimeElapsedColumn(),
            console=self._console,
            disable=not self._shows,
        ) as progress:
            task = progress.add_task("Generating", total=len(token_ids))
            return self._loop.run(self._all(token_ids, each, lambda _: progress.advance(task)))

    async def _all(
        self, token_ids: list[list[int]], params: Sequence[SamplingParams], on_done: Any
    ) -> list[RequestOutput]:
        tasks = [
            asyncio.create_task(self._frontend.generate(ids, one)) for ids, one in zip(token_ids, params, strict=True)
        ]
        for task in tasks:
            task.add_done_callback(on_done)
        try:
            return await asyncio.gather(*tasks)
        finally:  # after an error or Ctrl-C the others must not go on
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


class _Meter:
    """Passes tokens on and counts them."""

    def __init__(self, source: TokenGenerator) -> None:
        self._source = source
        self.num_tokens = 0

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenDelta, None]:
        deltas = self._source.generate(request)
        try:
            async for delta in deltas:
                self.num_tokens += len(delta.token_ids)
                yield delta
        finally:
            await deltas.aclose()


class _TokenRate(ProgressColumn):
    """Tokens per second since the bar was made."""

    def __init__(self, meter: _Meter) -> None:
        super().__init__()
        self._meter = meter
        self._before = meter.num_tokens

    def render(self, task: Task) -> Text:
        """Called by rich at every refresh."""
        return Text(f"{(self._meter.num_tokens - self._before) / max(task.elapsed or 0.0, 0.1):,.0f} tokens/s")


def _config(model: str, num_threads: int | None, keys: dict[str, Any]) -> WarmrootConfig:
    sections = (ModelConfig, ParallelConfig, CacheConfig, SchedulerConfig, SpeculationConfig)
    allowed = {key for section in sections for key in section.model_fields}
    foreign = WarmrootConfig.keys().keys() - allowed
    for key in keys:
        if key in foreign:
            raise ConfigError(f"{key}: does not apply to an engine in this process", param=key)
    # The caller's list is the queue, and nobody watches single tokens come.
    ours = {
        "max_num_queued_reqs": _UNBOUNDED,
        "max_queue_wait": 0,
        "max_prefill_chunk": _UNBOUNDED,
        "threads_per_replica": num_threads,
    }
    return WarmrootConfig.of(model, **{**ours, **keys})


def _prompts(prompts: Prompt | Sequence[Prompt]) -> Sequence[Prompt]:
    """A lone prompt stands for a list of one."""
    if isinstance(prompts, str) or (prompts and isinstance(prompts[0], int)):
        return [cast(Prompt, prompts)]
    return cast("Sequence[Prompt]", prompts)


def _conversations(messages: Sequence[Message] | Sequence[Sequence[Message]]) -> Sequence[Sequence[Message]]:
    if messages and isinstance(messages[0], dict):
        return [cast("Sequence[Message]", messages)]
    return cast("Sequence[Sequence[Message]]", messages)


def _params(params: Params, count: int) -> Sequence[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if len(params) != count:
        raise InvalidRequestError(f"{len(params)} sampling params for {count} prompts", param="params")
    return params
