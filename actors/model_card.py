"""What clients must know of a served model, from its configuration and files: no weights, no torch, no replica."""

from pathlib import Path

from ..cluster.config import WarmrootConfig
from ..cluster.messages import ModelCard
from ..router.tokenizer import Tokenizer
from .models.source import resolve_model
from .models.spec import model_len, read_spec


def read_card(config: WarmrootConfig, token: str) -> ModelCard:
    """The card that replicas of ``config`` would put on the bus; of a hub id only the small files are downloaded.

    Raises ModelLoadError and ConfigError.
    """
    path = resolve_model(config.model.model, config.model.revision, weights=False)
    spec = read_spec(path)
    return make_card(
        config,
        load_tokenizer(config, path),
        token=token,
        vocab_size=spec.vocab_size,
        max_model_len=model_len(spec, config.model.max_model_len),
    )


def make_card(
    config: WarmrootConfig, tokenizer: Tokenizer, *, token: str, vocab_size: int, max_model_len: int
) -> ModelCard:
    """The card of a model. ``token`` opens the channels of its replicas."""
    model, routing = config.model, config.routing
    return ModelCard(
        model=model.names[0],
        names=model.names,
        tokenizer=tokenizer.to_dict(),
        max_model_len=max_model_len,
        vocab_size=vocab_size,
        token=token,
        routing_policy=routing.routing_policy,
        late_binding_backlog=routing.late_binding_backlog,
        max_replica_losses=routing.max_replica_losses,
        seed=model.seed,
        limits={**config.limits.model_dump(), "no_replica_timeout": _no_replica_timeout(config)},
        overload=config.overload.model_dump(exclude_none=True),
        max_num_queued_reqs=config.scheduler.max_num_queued_reqs,
        channel_tls=config.tls.channel,
        tool_call_parser=model.tool_call_parser,
    )


def _no_replica_timeout(config: WarmrootConfig) -> float:
    """Where no replica is the usual thing, a request waits as long as one may take to start."""
    limits = config.limits
    if config.autoscaling.min_replicas or "no_replica_timeout" in limits.model_fields_set:
        return limits.no_replica_timeout
    return max(limits.no_replica_timeout, limits.replica_start_timeout)


def load_tokenizer(config: WarmrootConfig, path: Path) -> Tokenizer:
    """The model's tokenizer, or the one that the configuration names."""
    return Tokenizer.from_path(tokenizer_path(config, path), config.model.chat_template)


def tokenizer_path(config: WarmrootConfig, path: Path) -> Path:
    """Where that tokenizer is."""
    model = config.model
    return path if model.tokenizer is None else resolve_model(model.tokenizer, model.revision, weights=False)
