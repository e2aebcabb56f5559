"""A rank's part of the forward pass between the stages before and after it."""

import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch

from ...cluster.model_spec import ModelSpec
from ..attention.interface import AttentionMetadata
from ..attention.kv_memory import KvMemory
from ..layers.moe import MoeMLP
from .collectives import Collectives, Pending


class StageDecoder(Protocol):
    """The layers of a stage."""

    spec: ModelSpec
    dtype: torch.dtype
    device: torch.device

    @property
    def sparse_mlps(self) -> Mapping[int, MoeMLP]:
        """Of its layers with experts, in order, by the layers' numbers in the model."""
        ...

    def forward(
        self,
        token_ids: torch.Tensor | None,
        positions: torch.Tensor,
        kv: KvMemory,
        metadata: tuple[AttentionMetadata, ...],
        hidden: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The first stage embeds token ids [T], the others take hidden states [T, hidden]; the last one normalises."""
        ...


@dataclass(slots=True)
class PipelineStage:
    """Takes hidden states from the same rank of the stage before, and hands its own on to the next."""

    decoder: StageDecoder
    group: Collectives
    waited_s: float = 0.0
    """Seconds spent waiting for the stage before."""
    _sending: Pending | None = None
    _expected: deque[tuple[torch.Tensor, Pending]] = field(default_factory=deque[tuple[torch.Tensor, Pending]])

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        kv: KvMemory,
        metadata: tuple[AttentionMetadata, ...],
    ) -> torch.Tensor | None:
        """Hidden states [T, hidden] after the final norm; None where a later stage goes on. Raises RankLostError.

        Returns when the hidden states are on their way: so this stage takes the next plan while that one computes.
        """
        rank, hidden = self.group.rank, None
        if rank > 0:
            hidden = self._received(len(positions))
        hidden = self.decoder.forward(token_ids if rank == 0 else None, positions, kv, metadata, hidden)
        if rank == self.group.size - 1:
            return hidden
        if self._sending is not None:
            self._sending.wait()
        self._sending = self.group.send(hidden, rank + 1)
        return None

    def expect(self, num_tokens: int) -> None:
        """Let the hidden states of a step come, in the order of the steps, while another one computes.

        gloo sends nothing before the receiver asks for it.
        """
        if self.group.rank > 0 and num_tokens:
            self._expected.append(self._ask(num_tokens))

    def idle(self) -> None:
        """Take part in a step that computes nothing here: tokens of other groups come to this rank's experts."""
        decoder = self.decoder
        nothing = torch.empty(0, decoder.spec.hidden_size, dtype=decoder.dtype, device=decoder.device)
        with torch.inference_mode():
            for mlp in decoder.sparse_mlps.values():
                mlp(nothing)

    def _received(self, num_tokens: int) -> torch.Tensor:
        hidden, pending = self._expected.popleft() if self._expected else self._ask(num_tokens)
        began = time.perf_counter()
        pending.wait()
        self.waited_s += time.perf_counter() - began
        return hidden

    def _ask(self, num_tokens: int) -> tuple[torch.Tensor, Pending]:
        decoder = self.decoder
        hidden = torch.empty(num_tokens, decoder.spec.hidden_size, dtype=decoder.dtype, device=decoder.device)
        return hidden, self.group.start_recv(hidden, self.group.rank - 1)
