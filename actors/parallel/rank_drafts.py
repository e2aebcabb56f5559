"""What a rank of a gang has to do with drafts.

A drafting model is whole on each rank that samples, and has pages of its own there. So are Medusa's heads, which have
none. The model's own first layers draft where they are: on all ranks of a stage together. Where they are in another
stage than the head, the rank that samples has copies of them, which are a drafting model like any other.
"""

from collections.abc import Callable

import torch

from ...cluster.kv_layout import KvLayout
from ...cluster.speculative_config import SpeculativeConfig
from ..attention.kv_memory import KvMemory, KvType
from ..models.decoder import Decoder
from ..models.draft_head import load_draft_model
from ..models.loader import load_model
from ..runner.drafting import Drafts
from ..runner.load_drafter import drafter_of, drafter_over, skipped_layers
from .draft_passes import FollowingDrafter, LeadingDrafter, LeadingLayers, SharedPasses
from .gang_config import GangConfig
from .shard import Shard


def load_draft(config: GangConfig, shard: Shard, device: torch.device) -> Decoder | None:
    """The model that drafts on a rank, if it has one. Raises ModelLoadError, ConfigError."""
    speculation = config.speculation
    if speculation is None or not shard.own.samples:
        return None
    if config.draft_path is not None and speculation.drafts_with_model:
        return load_draft_model(config.draft_path, dtype=config.dtype, device=device)
    if speculation.method != "layer_skip" or config.topology.pp == 1:
        return None
    spec = shard.own.spec
    return load_model(
        config.path,
        dtype=config.dtype,
        quantization=config.quantization,
        device=device,
        shard=Shard.whole(spec.first_layers(speculation.drafting_layers(spec.num_layers))),
    )


class RankDrafts:
    """Makes a rank's drafter, and lets the rank take part in the drafts of others."""

    def __init__(self, config: GangConfig, shard: Shard, decoder: Decoder) -> None:
        self._speculation = config.speculation
        self._draft_path = config.draft_path
        self._shard = shard
        self._decoder = decoder
        self._passes: SharedPasses | None = None

    def drafter(
        self, layout: KvLayout, num_blocks: int, kv_dtype: KvType, draft: Decoder | None
    ) -> Callable[[KvMemory], Drafts] | None:
        """What makes it from the rank's KV pages; None where there is nothing to do. Raises ConfigError."""
        speculation, topology = self._speculation, self._shard.layout.topology
        if speculation is None:
            return None
        if speculation.method == "layer_skip" and topology.pp == 1:
            return lambda kv: self._by_shared_layers(speculation, kv)
        if not self._shard.own.samples:
            return None
        return drafter_of(speculation, self._decoder, layout, num_blocks, kv_dtype, draft, self._draft_path)

    def _by_shared_layers(self, speculation: SpeculativeConfig, kv: KvMemory) -> Drafts:
        groups, exchanges = self._shard.groups, self._shard.layout.topology.exchanges_tokens
        layers = skipped_layers(speculation, self._decoder, kv)
        passes = self._passes = SharedPasses(layers, groups, self._decoder.device, exchanges_tokens=exchanges)
        if not self._shard.own.samples:
            return FollowingDrafter(passes)
        leading = LeadingLayers(passes)
        drafter = drafter_over(leading, speculation, self._decoder, kv.layout.block_size)
        return LeadingDrafter(drafter, leading, passes)

    def idle(self) -> None:
        """After a step that computes nothing here."""
        if self._passes is not None:
            self._passes.idle()
