"""From configuration to a drafter."""

from collections.abc import Callable

import torch

from ...cluster.kv_layout import KvLayout
from ...cluster.model_spec import ModelSpec
from ...cluster.speculative_config import SpeculativeConfig
from ..attention.kv_memory import KvMemory, KvType
from ..models.decoder import Decoder
from .choice import choice_for
from .draft_layers import DraftModel, LayerSkip, draft_layout
from .drafting import Drafter, DraftLayers
from .memory import page_bytes


def drafter_of(
    speculation: SpeculativeConfig,
    decoder: Decoder,
    layout: KvLayout,
    num_blocks: int,
    kv_dtype: KvType,
    draft: Decoder | None,
) -> Callable[[KvMemory], Drafter] | None:
    """What makes the drafter of a runner from its KV pages; None where no layers draft. Raises ConfigError."""
    if not speculation.drafts_on_ranks:
        return None
    # Quantised pages take tokens in order and once; a drafting model goes back over what it guessed wrong.
    dtype = kv_dtype if isinstance(kv_dtype, torch.dtype) else torch.float16
    model = None if draft is None else DraftModel(draft, decoder.spec, layout, num_blocks, dtype)

    def make(kv: KvMemory) -> Drafter:
        num_layers = speculation.num_layers or max(1, len(decoder.layers) // 3)
        layers: DraftLayers = model or LayerSkip(decoder, kv, num_layers)
        coupled = speculation.verification == "coupled"
        eos_token_ids = decoder.spec.eos_token_ids
        return Drafter(layers, choice_for(decoder.device), eos_token_ids, layout.block_size, coupled=coupled)

    return make


def shared_blocks(spec: ModelSpec, draft: ModelSpec, layout: KvLayout, num_blocks: int) -> int:
    """Blocks that two models get in the memory of ``num_blocks`` of the first. Raises ConfigError."""
    own = page_bytes(spec, layout, torch.float16)
    beside = page_bytes(draft, draft_layout(draft, spec, layout), torch.float16)
    return max(2, num_blocks * own // (own + beside))
