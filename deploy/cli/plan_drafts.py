"""What drafts take in a capacity plan, by the files of whatever makes them."""

import json
from dataclasses import replace
from pathlib import Path

from ...actors.models.source import resolve_model
from ...actors.models.spec import read_spec
from ...cluster.capacity import DraftNeeds, Needs
from ...cluster.config import ModelConfig, WarmrootConfig
from ...cluster.errors import ModelLoadError
from ...cluster.model_spec import ModelSpec
from .plan_weights import kept_weights

_REDUCED_HEAD = "draft_head.safetensors"


def with_drafts(needs: Needs, config: WarmrootConfig, path: Path, spec: ModelSpec, device: str) -> Needs:
    """The needs of a replica whose drafts are configured. Raises ModelLoadError, ConfigError."""
    speculation = config.speculation.speculative_config
    if speculation is None:
        return needs
    if speculation.method == "layer_skip" and config.parallel.topology().pp > 1:
        first = spec.first_layers(speculation.drafting_layers(spec.num_layers))
        return replace(needs, draft=_model(needs, config.model, path, first, device))
    if speculation.model is None:  # what is looked up, and the model's own layers where they are, take nothing
        return needs
    folder = resolve_model(speculation.model, weights=False)
    if speculation.method == "medusa":
        return replace(needs, draft=_heads(folder))
    plain = config.model.model_copy(update={"model": speculation.model, "quantization": "auto"})
    draft, head = _model(needs, plain, folder, read_spec(folder), device), folder / _REDUCED_HEAD
    more = head.stat().st_size if head.is_file() else 0
    return replace(needs, draft=replace(draft, weight_bytes=draft.weight_bytes + more))


def _model(needs: Needs, model: ModelConfig, path: Path, spec: ModelSpec, device: str) -> DraftNeeds:
    return DraftNeeds.of_model(spec, kept_weights(model, path, spec, device), needs.kv_format, needs.block_size)


def _heads(folder: Path) -> DraftNeeds:
    """Medusa's, in 16 bits: see ``actors/models/medusa.py``."""
    try:
        config = json.loads((folder / "config.json").read_text())
        heads, hidden = int(config["num_heads"]), int(config["hidden_size"])
        width = int(config.get("truncated_vocab_size") or config["vocab_size"])
    except (OSError, ValueError, KeyError) as error:
        raise ModelLoadError(f"{folder}/config.json: not of Medusa heads: {error}") from error
    outputs = 1 if config.get("original_lm_head", False) else heads
    return DraftNeeds(weight_bytes=2 * hidden * (heads * hidden + outputs * width) + 4 * heads * hidden)
