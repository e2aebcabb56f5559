"""A model with its engine, from configuration to a running ``LocalEngine``."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ..cluster.config import WarmrootConfig
from ..cluster.ids import BlockHash, Epoch, ReplicaId
from ..cluster.kv_formats import kv_format
from ..cluster.messages import ModelCard, ReplicaInfo
from ..kv_store.hashing import namespace_root
from ..router.tokenizer import Tokenizer
from .engine.config import EngineConfig
from .engine.engine import Engine
from .local_engine import DeltaSink, EventSink, LocalEngine
from .models.available import cpu_kernels
from .models.source import resolve_model
from .models.spec import model_len
from .runner.calibration import Calibration, calibrate
from .runner.load import KvMemoryConfig, load_runner
from .runner.runner import ModelRunner
from .runner.threaded import ThreadedExecutor
from .runner.threads import use_threads

WEIGHTS_VERSION = "0"
"""Of the weights as they were loaded; an update of the weights moves the namespace of the cache on."""

MAX_DECODE_DELAY_S = 0.25
MIN_CHUNK = 32

Report = Callable[[str, int, int], None]
"""Told (stage, bytes done, bytes in all) while a model loads."""


@dataclass(frozen=True, slots=True)
class EngineHost:
    """A loaded and measured model. ``start`` gives it an engine."""

    config: WarmrootConfig
    runner: ModelRunner
    tokenizer: Tokenizer
    calibration: Calibration
    namespace: BlockHash
    max_model_len: int
    num_threads: int

    @classmethod
    def load(cls, config: WarmrootConfig, report: Report) -> "EngineHost":
        """Find the model, load it, warm it up. Raises ModelLoadError and ConfigError."""
        model, cache = config.model, config.cache
        num_threads = use_threads(config.deploy.threads_per_replica)
        report("finding the model", 0, 0)
        path = resolve_model(model.model, model.revision)
        runner = load_runner(
            path,
            dtype=model.dtype,
            quantization=model.quantization,
            kv=KvMemoryConfig(
                block_size=cache.block_size,
                kv_cache_dtype=cache.kv_cache_dtype,
                num_kv_blocks=cache.num_kv_blocks,
                kv_cache_memory=cache.kv_cache_memory,
                gpu_memory_utilization=cache.gpu_memory_utilization,
                num_sharers=config.deploy.num_replicas,
            ),
            max_model_len=model.max_model_len,
            max_num_seqs=config.scheduler.max_num_seqs,
            progress=lambda done, total: report("loading weights", done, total),
        )
        report("reading the tokenizer", 0, 0)
        tokenizer = load_tokenizer(config, path)
        report("warming up", 0, 0)
        weights = f"{WEIGHTS_VERSION} {runner.decoder.weights_format}"
        return cls(
            config=config,
            runner=runner,
            tokenizer=tokenizer,
            calibration=calibrate(runner),
            namespace=namespace_root(model.names[0], weights, "", _kv_format(runner), ""),
            max_model_len=model_len(runner.decoder.spec, model.max_model_len),
            num_threads=num_threads,
        )

    def start(self, on_deltas: DeltaSink, on_events: EventSink = lambda events: None) -> LocalEngine:
        """Run an engine over the model; see ``LocalEngine`` for the sinks."""
        scheduler = self.config.scheduler
        settings = EngineConfig(
            max_model_len=self.max_model_len,
            max_num_seqs=scheduler.max_num_seqs,
            max_num_batched_tokens=scheduler.max_num_batched_tokens,
            max_prefill_chunk=scheduler.max_prefill_chunk or self._chunk(),
            max_num_queued_reqs=scheduler.max_num_queued_reqs,
            enable_prefix_caching=self.config.cache.enable_prefix_caching,
            eos_token_ids=self.runner.eos_token_ids,
            vocab_size=self.runner.decoder.spec.vocab_size,
        )
        # A CPU's cores are the model's already: to schedule beside it gains nothing there.
        executor = self.runner if self.runner.decoder.device.type == "cpu" else ThreadedExecutor(self.runner)
        engine = Engine(executor, settings, time.monotonic, self.namespace)
        return LocalEngine(engine, executor, on_deltas, on_events)

    def _chunk(self) -> int:
        """Prompt tokens that running decodes can wait for."""
        return max(MIN_CHUNK, int(self.calibration.prefill_tokens_per_s * MAX_DECODE_DELAY_S))

    @property
    def kernels(self) -> str:
        """What computes: native kernels of an instruction set, torch and why, or a GPU."""
        return cpu_kernels() if self.runner.decoder.device.type == "cpu" else "cuda"

    def describe(self, replica: ReplicaId, epoch: Epoch, address: str, *, node: str, pid: int) -> ReplicaInfo:
        """What the replica announces on the bus."""
        scheduler = self.config.scheduler
        return ReplicaInfo(
            replica=replica,
            epoch=epoch,
            model=self.config.model.names[0],
            address=address,
            kv_namespace=self.namespace,
            block_size=self.runner.layout.block_size,
            kv_total_blocks=self.runner.num_blocks - 1,
            max_num_seqs=scheduler.max_num_seqs,
            max_num_batched_tokens=scheduler.max_num_batched_tokens,
            max_model_len=self.max_model_len,
            prefill_tokens_per_s=self.calibration.prefill_tokens_per_s,
            decode_step_s=self.calibration.decode_step_s,
            node=node,
            pid=pid,
            kernels=self.kernels,
            weights_format=self.runner.decoder.weights_format,
            kv_format=_kv_format(self.runner),
            num_threads=self.num_threads,
        )

    def card(self, token: str) -> ModelCard:
        """What clients must know to use the model."""
        model = self.config.model
        return ModelCard(
            model=model.names[0],
            names=model.names,
            tokenizer=self.tokenizer.to_dict(),
            max_model_len=self.max_model_len,
            vocab_size=self.runner.decoder.spec.vocab_size,
            token=token,
            routing_policy=self.config.routing.routing_policy,
            seed=model.seed,
        )


def _kv_format(runner: ModelRunner) -> str:
    return kv_format("auto", str(runner.kv_dtype).removeprefix("torch.")).name


def load_tokenizer(config: WarmrootConfig, path: Path) -> Tokenizer:
    """The model's tokenizer, or the one that the configuration names."""
    model = config.model
    source = path if model.tokenizer is None else resolve_model(model.tokenizer, model.revision)
    return Tokenizer.from_path(source, model.chat_template)
