"""A model with its engine, from configuration to a running ``LocalEngine``."""

from collections.abc import Callable
from dataclasses import dataclass

from ..cluster.config import WarmrootConfig
from ..cluster.ids import BlockHash, Epoch, ReplicaId
from ..cluster.kv_formats import KV_FORMATS
from ..cluster.messages import ModelCard, ReplicaInfo
from ..kv_store.hashing import namespace_root
from ..router.tokenizer import Tokenizer
from .engine.config import EngineConfig
from .loaded_model import LoadedModel, StartCrew
from .local_engine import DeltaSink, EventSink, FailureSink, LocalEngine, ignore
from .model_card import load_tokenizer, make_card
from .models.fingerprint import fingerprint
from .models.source import resolve_model
from .models.spec import model_len
from .parallel.spawn import RankProcesses
from .runner.calibration import Calibration, calibrate

MAX_DECODE_DELAY_S = 0.25
MIN_CHUNK = 32

Report = Callable[[str, int, int], None]
"""Told (stage, bytes done, bytes in all) while a model loads."""


@dataclass(frozen=True, slots=True)
class EngineHost:
    """A loaded and measured model. ``start`` gives it an engine."""

    config: WarmrootConfig
    model: LoadedModel
    tokenizer: Tokenizer
    calibration: Calibration
    weights_version: str
    """Of the weights that were loaded."""
    max_model_len: int
    """Prompt and output tokens that one request can have: by the configuration, the model, and KV memory."""

    @classmethod
    def load(cls, config: WarmrootConfig, report: Report, start_crew: StartCrew = RankProcesses) -> "EngineHost":
        """Find the model, load it, warm it up. ``start_crew`` starts the ranks of a model that is cut.

        Raises ModelLoadError and ConfigError, RankLostError.
        """
        report("finding the model", 0, 0)
        path = resolve_model(config.model.model, config.model.revision)
        model = LoadedModel.load(config, path, start_crew, lambda done, total: report("loading weights", done, total))
        try:
            report("reading the tokenizer", 0, 0)
            tokenizer = load_tokenizer(config, path)
            report("warming up", 0, 0)
            calibration = calibrate(model.executor)
        except BaseException:
            model.executor.shutdown()
            raise
        return cls(
            config=config,
            model=model,
            tokenizer=tokenizer,
            calibration=calibration,
            weights_version=config.model.weights_version or fingerprint(path),
            max_model_len=_room(model, config),
        )

    def namespace(self, weights_version: str, weights_format: str) -> BlockHash:
        """Root of the block hashes with such weights."""
        weights = f"{weights_version} {weights_format}"
        return namespace_root(self.config.model.names[0], weights, "", self.model.kv_format, "")

    def start(
        self, on_deltas: DeltaSink, on_events: EventSink = ignore, on_failure: FailureSink = ignore
    ) -> LocalEngine:
        """Run an engine over the model; see ``LocalEngine`` for the sinks."""
        scheduler = self.config.scheduler
        settings = EngineConfig(
            max_model_len=self.max_model_len,
            max_num_seqs=scheduler.max_num_seqs,
            max_num_batched_tokens=scheduler.max_num_batched_tokens,
            max_prefill_chunk=scheduler.max_prefill_chunk or self._chunk(),
            max_num_queued_reqs=scheduler.max_num_queued_reqs,
            max_num_queued_tokens=self.config.overload.replica_tokens(self.calibration.prefill_tokens_per_s),
            prefill_tokens_per_s=self.calibration.prefill_tokens_per_s,
            enable_prefix_caching=self.config.cache.enable_prefix_caching,
            share_partial_blocks=not KV_FORMATS[self.model.kv_format].quantises_blocks,
            eos_token_ids=self.model.spec.eos_token_ids,
            vocab_size=self.model.spec.vocab_size,
            speculation=self.config.speculation.speculative_config,
        )
        namespace = self.namespace(self.weights_version, self.model.weights_format)
        return self.model.start(settings, namespace, self.weights_version, on_deltas, on_events, on_failure)

    def _chunk(self) -> int:
        """Prompt tokens that running decodes can wait for."""
        return max(MIN_CHUNK, int(self.calibration.prefill_tokens_per_s * MAX_DECODE_DELAY_S))

    def describe(self, replica: ReplicaId, epoch: Epoch, address: str, *, node: str, pid: int) -> ReplicaInfo:
        """What the replica announces on the bus."""
        scheduler, model, executor = self.config.scheduler, self.model, self.model.executor
        return ReplicaInfo(
            replica=replica,
            epoch=epoch,
            model=self.config.model.names[0],
            address=address,
            kv_namespace=self.namespace(self.weights_version, model.weights_format),
            block_size=executor.layout.block_size,
            kv_total_blocks=(executor.num_blocks - 1) * model.num_groups,
            max_num_seqs=scheduler.max_num_seqs * model.num_groups,
            max_num_batched_tokens=scheduler.max_num_batched_tokens,
            max_model_len=self.max_model_len,
            prefill_tokens_per_s=self.calibration.prefill_tokens_per_s,
            decode_step_s=self.calibration.decode_step_s,
            node=node,
            pid=pid,
            kernels=model.kernels,
            weights_format=model.weights_format,
            weights_version=self.weights_version,
            kv_format=model.kv_format,
            num_threads=model.num_threads,
            ranks=model.ranks(),
        )

    def card(self, token: str) -> ModelCard:
        """What clients must know to use the model."""
        return make_card(
            self.config,
            self.tokenizer,
            token=token,
            vocab_size=self.model.spec.vocab_size,
            max_model_len=self.max_model_len,
        )


def _room(model: LoadedModel, config: WarmrootConfig) -> int:
    executor = model.executor
    in_cache = executor.layout.max_tokens(executor.num_blocks)
    return min(model_len(model.spec, config.model.max_model_len), in_cache)
