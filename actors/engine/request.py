"""What the engine knows of one sequence."""

from array import array
from enum import IntEnum
from math import inf

from ...cluster.ids import BlockHash, RequestId
from ...cluster.messages import FinishReason, GenerateRequest, TokenLogprob
from ...cluster.sampling_params import SamplingParams
from ...kv_store.hashing import TOKEN_BYTES, pack_tokens
from ...kv_store.prefix_cache import KvLease
from ...kv_store.radix import Node
from .draft_tree import NO_DRAFT
from .ngram import NgramIndex


class Status(IntEnum):
    """Where a request is. FINISHED is final; its pages may still be held until the step in flight is done."""

    WAITING = 0
    RUNNING = 1
    FINISHED = 2


class Request:
    """One sequence: ``tokens`` are prompt and output, of which the first ``num_computed`` have their KV in pages.

    Steps in flight have been given tokens up to ``num_scheduled``, and will bring the sequence to ``num_expected``.
    """

    __slots__ = (
        "acceptance",
        "cache_salt",
        "cached_tokens",
        "deadline",
        "draft",
        "drafted",
        "id",
        "known",
        "lease",
        "max_tokens",
        "namespace",
        "ngrams",
        "node",
        "num_asked",
        "num_computed",
        "num_expected",
        "num_in_flight",
        "num_preemptions",
        "num_prompt",
        "num_scheduled",
        "num_sent_blocks",
        "order",
        "overtaken",
        "packed",
        "params",
        "priority",
        "prompt_logprobs",
        "queued_at",
        "seed",
        "started_at",
        "status",
        "tenant",
        "tokens",
        "told_version",
        "uncached",
    )

    def __init__(self, source: GenerateRequest, namespace: BlockHash, limit: int, order: tuple[float, int]) -> None:
        """``limit`` bounds prompt and output together. Raises OverflowError or TypeError for tokens not in int32."""
        self.id: RequestId = source.request_id
        self.params: SamplingParams = source.params
        self.priority = source.priority
        self.tenant = source.tenant
        self.deadline = inf
        """By the engine's clock."""
        self.queued_at = self.started_at = 0.0
        """By the engine's clock: when it came, and when its first step was planned; 0 before."""
        self.cache_salt, self.namespace = source.cache_salt, namespace
        self.tokens = array("i", source.prompt_token_ids)
        self.tokens.extend(source.output_token_ids)
        self.num_prompt = len(source.prompt_token_ids)
        wanted = source.params.max_tokens
        self.max_tokens = limit if wanted is None else min(limit, self.num_prompt + wanted)
        """Of prompt and output together."""
        self.seed = source.seed
        self.order = order
        self.status = Status.WAITING
        self.num_computed = self.num_scheduled = 0
        self.num_expected = len(self.tokens)
        self.num_in_flight = 0
        """Steps that have been submitted with it and have not landed."""
        self.drafted = NO_DRAFT
        """What the step in flight verifies."""
        self.num_asked = 0
        """Tokens that the ranks draft after the step in flight."""
        self.draft = NO_DRAFT
        """Guesses, by the ranks, of what follows ``tokens``."""
        self.acceptance: float | None = None
        """How often its guesses are right, lately, as an ``Acceptance`` counts it; None: not known."""
        self.ngrams: NgramIndex | None = None
        self.num_preemptions = self.overtaken = 0
        self.lease: KvLease | None = None
        self.known = False
        """Whether the ranks have it."""
        self.num_sent_blocks = 0
        self.cached_tokens: int | None = None
        """Tokens of its prompt, and of the output that it came with, found in the cache when it first started."""
        self.told_version: str | None = None
        """The version of the weights that its last tokens were told to come from; None before the first delta."""
        wants_prompt = source.params.prompt_logprobs is not None and not source.output_token_ids
        self.prompt_logprobs: list[TokenLogprob | None] | None = [None] if wants_prompt else None
        """Collected so far; None when not asked for or delivered already."""
        self.packed = pack_tokens(self.tokens)
        """``tokens`` for look-ups in the tree, while it waits."""
        self.node: Node | None = None
        """The deepest cached block seen by the last look-up, while it waits."""
        self.uncached = 0
        """Tokens that were not cached when it began to wait."""

    def requeue(self) -> None:
        """Back to waiting, with nothing computed; the output so far is kept."""
        self.status = Status.WAITING
        self.num_preemptions += 1
        self.num_computed = self.num_scheduled = 0
        self.draft = NO_DRAFT
        self.packed = pack_tokens(self.tokens)
        self.node = None
        if self.prompt_logprobs is not None:
            self.prompt_logprobs = [None]

    @property
    def num_tokens(self) -> int:
        """Prompt and output tokens."""
        return len(self.tokens)

    @property
    def num_output(self) -> int:
        """Output tokens, those of an earlier replica included."""
        return len(self.tokens) - self.num_prompt

    @property
    def awaits_token(self) -> bool:
        """Whether its last token is still being sampled."""
        return self.num_expected > len(self.tokens)

    @property
    def reported(self) -> bool:
        """Whether a first delta has gone out."""
        return self.told_version is not None

    @property
    def has_begun(self) -> bool:
        """Whether something was computed for it, here or elsewhere."""
        return self.cached_tokens is not None or self.num_output > 0

    @property
    def reads_cache(self) -> bool:
        """Prompt log-probabilities and means over the prompt need every position of it computed."""
        return self.prompt_logprobs is None and self.params.pooling != "mean"

    def block_tokens(self, index: int, block_size: int) -> bytes:
        """Packed tokens of a block; shorter where the sequence ends."""
        if self.status is Status.WAITING:
            return self.packed[index * block_size * TOKEN_BYTES : (index + 1) * block_size * TOKEN_BYTES]
        return pack_tokens(self.tokens[index * block_size : (index + 1) * block_size])

    def end(self, eos_token_ids: tuple[int, ...]) -> tuple[FinishReason, int | None] | None:
        """Why the sequence is over, and the stop token that did it, judged by its last token; None: it goes on."""
        if self.num_output and self.num_output >= self.params.min_tokens:
            last = self.tokens[-1]
            if not self.params.ignore_eos and last in eos_token_ids:
                return FinishReason.STOP, None
            if last in self.params.stop_token_ids:
                return FinishReason.STOP, last
        return (FinishReason.LENGTH, None) if len(self.tokens) >= self.max_tokens else None
