"""What the scheduler tells the ranks each step, and what they answer.

A plan is a diff: new requests come whole, known ones only with their new blocks.
"""

from dataclasses import dataclass, field

from ...cluster.ids import BlockId, RequestId
from ...cluster.messages import TokenLogprob
from ...cluster.sampling_params import SamplingParams
from .draft_tree import NO_DRAFT, Draft

BlockTables = tuple[list[BlockId], ...]
"""Per KV group, the block of each ``block_size`` tokens; NULL_BLOCK where the window has passed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NewSequence:
    """A sequence that the ranks have not seen (or have dropped on preemption).

    ``token_ids`` are prompt and output so far; the first ``num_prompt_tokens`` of them are the prompt (penalties
    and prompt log-probabilities care). ``seed`` is set: it was drawn where the request entered.
    """

    request_id: RequestId
    token_ids: list[int]
    num_prompt_tokens: int
    params: SamplingParams
    seed: int
    num_computed: int
    block_tables: BlockTables


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceStep:
    """How one sequence advances: ``num_tokens`` from ``num_computed`` on are computed.

    If they reach the end of the sequence (``samples``) a token is sampled and the ranks append it themselves.
    ``new_blocks`` are appended to the block table of each group.

    ``draft`` are guesses of what follows the last known token, the last of the ``num_tokens``. Tokens are sampled as
    far as guesses are right, and one more: the ranks append those alone. After that they guess up to ``num_drafts``
    tokens for the next step. A tree comes behind one known token.
    """

    request_id: RequestId
    num_computed: int
    num_tokens: int
    samples: bool
    new_blocks: BlockTables
    draft: Draft = NO_DRAFT
    num_drafts: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """One forward pass. ``copies`` (source, destination) run before it: copy-on-write of partly shared blocks.

    ``finished`` sequences (ended or preempted) are dropped first: ``new`` may bring the same id back. The block tables
    of a new sequence are complete, so its step has no ``new_blocks``.
    """

    step: int
    finished: tuple[RequestId, ...] = ()
    new: tuple[NewSequence, ...] = ()
    sequences: tuple[SequenceStep, ...] = ()
    copies: tuple[tuple[BlockId, BlockId], ...] = ()
    least_probability: float = 0.0
    """Of guesses that are worth their time in the next step, where that is known before it."""
    adopts: str = ""
    """Version of weights that every rank has prepared and computes with from this step on."""

    @property
    def num_tokens(self) -> int:
        """Tokens computed in this step."""
        return sum(sequence.num_tokens for sequence in self.sequences)


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceResult:
    """What one sequence got from a step: sampled tokens (none for an unfinished prefill chunk)."""

    request_id: RequestId
    token_ids: list[int]
    logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: list[TokenLogprob] | None = None
    """For the prompt tokens at positions num_computed+1 … of this chunk (the first token of a prompt has none)."""
    draft: Draft = NO_DRAFT
    """Guesses of what follows the sampled tokens."""
    error: str | None = None
    """Why no token could be sampled."""
    embedding: bytes | None = None
    """Of a prompt that has been computed, where it is asked for: float32, little-endian."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """The answer of the last pipeline stage's rank 0."""

    step: int
    sequences: list[SequenceResult] = field(default_factory=list[SequenceResult])
    error: str | None = None
