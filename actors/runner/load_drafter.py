"""From configuration to a drafter."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from ...cluster.kv_layout import KvLayout
from ...cluster.model_spec import ModelSpec
from ...cluster.speculative_config import SpeculativeConfig
from ..attention.interface import TreeBackend
from ..attention.kv_memory import KvMemory, KvType
from ..models.decoder import Decoder
from ..models.medusa import load_heads
from ..models.recurrent_head import is_recurrent_head, load_recurrent_head
from .choice import choice_for
from .draft_layers import DraftModel, LayerSkip, draft_layout
from .drafting import Drafter, DraftLayers, Drafts
from .medusa import WIDTH, MedusaDrafter
from .memory import page_bytes
from .recurrent_drafts import WIDTHS, RecurrentDrafter


def drafter_of(
    speculation: SpeculativeConfig,
    decoder: Decoder,
    layout: KvLayout,
    num_blocks: int,
    kv_dtype: KvType,
    draft: Decoder | None,
    heads: Path | None = None,
) -> Callable[[KvMemory], Drafts] | None:
    """What makes the drafter of a runner from its KV pages; None where no layers draft.

    ``heads`` is the folder of Medusa's. Raises ConfigError, ModelLoadError.
    """
    if not speculation.drafts_on_ranks:
        return None
    if heads is not None and speculation.method == "medusa":
        return _medusa(speculation, heads, decoder)
    dtype = draft_dtype(kv_dtype)
    model = None if draft is None else DraftModel(draft, decoder.spec, layout, num_blocks, dtype)

    def make(kv: KvMemory) -> Drafts:
        layers = model or skipped_layers(speculation, decoder, kv)
        return drafter_over(layers, speculation, decoder, layout.block_size)

    return make


def _medusa(speculation: SpeculativeConfig, folder: Path, decoder: Decoder) -> Callable[[KvMemory], Drafts]:
    """Chains, where the attention cannot read trees, and where pages are quantised: these take tokens in order."""
    if is_recurrent_head(folder):
        head = load_recurrent_head(folder, decoder)
        make_drafter, widths = (
            partial(RecurrentDrafter, head),
            speculation.tree or WIDTHS,
        )
    else:
        heads = load_heads(folder, decoder)
        make_drafter, widths = partial(MedusaDrafter, heads), speculation.tree or [WIDTH] * heads.num_heads

    def make(kv: KvMemory) -> Drafts:
        reads_trees = isinstance(decoder.backend, TreeBackend) and kv.open is None
        return make_drafter(widths if reads_trees else [1] * len(widths))

    return make


def skipped_layers(speculation: SpeculativeConfig, decoder: Decoder, kv: KvMemory) -> LayerSkip:
    """The model's own first layers, a third of them by default. Raises ConfigError."""
    return LayerSkip(decoder, kv, speculation.drafting_layers(len(decoder.layers)))


def drafter_over(
    layers: DraftLayers,
    speculation: SpeculativeConfig,
    decoder: Decoder,
    block_size: int,
    drafter: type[Drafter] = Drafter,
) -> Drafter:
    """Draws guesses for ``decoder`` from what the layers say."""
    coupled = speculation.verification == "coupled"
    return drafter(layers, choice_for(decoder.device), decoder.spec.eos_token_ids, block_size, coupled=coupled)


def draft_page_bytes(draft: ModelSpec, target: ModelSpec, layout: KvLayout, kv_dtype: KvType) -> int:
    """Bytes of a drafting model's page beside one of the model's. Raises ConfigError where the two do not suit."""
    return page_bytes(draft, draft_layout(draft, target, layout), draft_dtype(kv_dtype))


def draft_dtype(kv_dtype: KvType) -> torch.dtype:
    """Of a drafting model's pages, plain where the model's are quantised.

    Quantised pages take tokens in order and once; a drafting model goes back over what it guessed wrong.
    """
    return kv_dtype if isinstance(kv_dtype, torch.dtype) else torch.float16
