"""A model that is ready to run: in this process, or cut over the processes of a gang."""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ..cluster.config import WarmrootConfig
from ..cluster.errors import WarmrootError
from ..cluster.ids import BlockHash
from ..cluster.kv_formats import kv_format
from ..cluster.messages import RankInfo
from ..cluster.model_spec import ModelSpec
from ..cluster.weights_update import NewWeights
from .engine.config import EngineConfig
from .engine.engine import Engine
from .engine.executor import Executor
from .engine.joint import start_engines
from .local_engine import DeltaSink, EventSink, FailureSink, LocalEngine
from .model_card import load_tokenizer, tokenizer_path
from .models.available import kernels_on
from .models.source import resolve_model
from .models.weights import Progress
from .new_weights import open_new
from .parallel.gang import Crew, GangExecutor, start_gang
from .parallel.gang_config import GangConfig
from .parallel.shard import Shard
from .runner.load import KvMemoryConfig, load_runner
from .runner.next_weights import NextWeights
from .runner.threaded import ThreadedExecutor
from .runner.threads import use_threads

StartCrew = Callable[[GangConfig], Crew]
"""Starts the processes of a gang."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """An executor, and what others want to know of the model behind it."""

    executor: Executor
    spec: ModelSpec
    kernels: str
    """What computes: native kernels of an instruction set, torch and why, or a GPU."""
    weights_format: str
    kv_dtype: str
    num_threads: int
    next_weights: NextWeights | None = None
    """Of a model in this process."""

    @classmethod
    def load(cls, config: WarmrootConfig, path: Path, start_crew: StartCrew, progress: Progress) -> "LoadedModel":
        """In this process, or in a crew where there are several ranks. Raises ModelLoadError, ConfigError."""
        if config.parallel.topology().world_size == 1:
            return cls._in_process(config, path, progress)
        return cls._in_gang(gang_config(config, path), start_crew, progress)

    @classmethod
    def _in_process(cls, config: WarmrootConfig, path: Path, progress: Progress) -> "LoadedModel":
        num_threads = use_threads(config.deploy.threads_per_replica)
        runner = load_runner(
            path,
            dtype=config.model.dtype,
            quantization=config.model.quantization,
            kv=_kv_memory(config),
            max_model_len=config.model.max_model_len,
            max_num_seqs=config.scheduler.max_num_seqs,
            progress=progress,
            speculation=config.speculation.speculative_config,
            draft_path=_draft_path(config),
            open_tokenizer=lambda: load_tokenizer(config, path),
        )
        decoder = runner.decoder
        next_weights = NextWeights(
            decoder, Shard.whole(decoder.spec), dtype=config.model.dtype, quantization=config.model.quantization
        )
        runner.renew_with(next_weights)
        return cls(
            # A CPU's cores are the model's already: to schedule beside it gains nothing there.
            executor=runner if decoder.device.type == "cpu" else ThreadedExecutor(runner),
            spec=decoder.spec,
            kernels=kernels_on(decoder.device),
            weights_format=decoder.weights_format,
            kv_dtype=str(runner.kv_dtype).removeprefix("torch."),
            num_threads=num_threads,
            next_weights=next_weights,
        )

    @classmethod
    def _in_gang(cls, config: GangConfig, start_crew: StartCrew, progress: Progress) -> "LoadedModel":
        spec = config.layout().spec  # refuses what cannot be cut before a process starts
        gang = start_gang(start_crew(config), progress)
        first = gang.reports[0]
        return cls(
            executor=gang,
            spec=spec,
            kernels=first.kernels,
            weights_format=first.weights_format,
            kv_dtype=first.kv_dtype,
            num_threads=sum(report.num_threads for report in gang.reports),
        )

    @property
    def kv_format(self) -> str:
        """Name of the format of cached keys and values."""
        return kv_format("auto", self.kv_dtype).name

    @property
    def num_groups(self) -> int:
        """Groups of ranks with requests and KV blocks of their own."""
        return self.executor.num_groups if isinstance(self.executor, GangExecutor) else 1

    def ranks(self) -> tuple[RankInfo, ...]:
        """Of the gang, in order; none without one."""
        return tuple(self.executor.ranks()) if isinstance(self.executor, GangExecutor) else ()

    def prepare(self, new: NewWeights) -> str:
        """Load other weights beside those in use, on every rank, while steps run; returns their form.

        Raises ModelLoadError, ConfigError, RankLostError; then nothing is prepared that could be adopted.
        """
        if self.next_weights is not None:
            return self.next_weights.prepare(new.version, open_new(new))
        assert isinstance(self.executor, GangExecutor)
        try:
            return self.executor.prepare(new)
        except WarmrootError:
            self.discard()
            raise

    def discard(self) -> None:
        """Drop what was prepared."""
        if self.next_weights is not None:
            self.next_weights.discard()
        elif isinstance(self.executor, GangExecutor):
            self.executor.discard()

    def start(
        self,
        settings: EngineConfig,
        namespace: BlockHash,
        weights_version: str,
        on_deltas: DeltaSink,
        on_events: EventSink,
        on_failure: FailureSink,
    ) -> LocalEngine:
        """Run an engine; see ``LocalEngine`` for the sinks."""
        executor = self.executor
        gang = executor if isinstance(executor, GangExecutor) else None
        engine = (
            Engine(executor, settings, time.monotonic, namespace, weights_version=weights_version)
            if gang is None
            else start_engines(gang, settings, time.monotonic, namespace, weights_version)
        )
        local = LocalEngine(engine, executor, on_deltas, on_events, on_failure)
        if gang is not None:
            gang.lost.add_done_callback(lambda lost: local.fail(lost.result().message))
        return local


def _draft_path(config: WarmrootConfig) -> Path | None:
    speculation = config.speculation.speculative_config
    return None if speculation is None or speculation.model is None else resolve_model(speculation.model, None)


def gang_config(config: WarmrootConfig, path: Path) -> GangConfig:
    """What the ranks of a replica run."""
    topology = config.parallel.topology()
    return GangConfig(
        path=path,
        topology=topology,
        kv=_kv_memory(config),
        threads_per_rank=threads_per_rank(config),
        dtype=config.model.dtype,
        quantization=config.model.quantization,
        num_redundant_experts=config.parallel.num_redundant_experts,
        expert_balance_steps=config.parallel.expert_balance_steps,
        max_model_len=config.model.max_model_len,
        max_num_seqs=config.scheduler.max_num_seqs,
        speculation=config.speculation.speculative_config,
        draft_path=_draft_path(config),
        tokenizer=tokenizer_path(config, path),
        start_s=config.limits.replica_start_timeout,
        step_s=config.parallel.step_timeout,
    )


def threads_per_rank(config: WarmrootConfig) -> int:
    """The replica's CPU threads, or the cores of this machine, shared among its ranks."""
    return max(1, (config.deploy.threads_per_replica or os.cpu_count() or 1) // config.parallel.topology().world_size)


def _kv_memory(config: WarmrootConfig) -> KvMemoryConfig:
    cache = config.cache
    return KvMemoryConfig(
        block_size=cache.block_size,
        kv_cache_dtype=cache.kv_cache_dtype,
        num_kv_blocks=cache.num_kv_blocks,
        kv_cache_memory=cache.kv_cache_memory,
        gpu_memory_utilization=cache.gpu_memory_utilization,
        num_sharers=config.most_replicas,
        step_tokens=config.scheduler.max_num_batched_tokens,
    )
