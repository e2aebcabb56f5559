"""Values that travel between ingress and replica: a request one way, deltas the other."""

from dataclasses import dataclass, field
from enum import IntEnum
from hashlib import blake2b
from typing import Any

from .ids import Epoch, ReplicaId, RequestId
from .sampling_params import SamplingParams


class FinishReason(IntEnum):
    """Why a request ended. ``str(reason)`` is OpenAI's word for it."""

    STOP = 0
    LENGTH = 1
    ABORT = 2
    ERROR = 3
    DEADLINE = 4
    """Its deadline passed before it was done."""
    LOST = 5
    """The engine has failed, whatever this request was: it can go on elsewhere."""
    HANDED_BACK = 6
    """The replica is about to stop: it is to go on elsewhere."""
    REFUSED = 7
    """What it asks for turned out to be impossible, wherever it runs."""

    @property
    def is_failure(self) -> bool:
        """Whether the request has not got what it asked for, for want of an engine that does it."""
        return self in (FinishReason.ERROR, FinishReason.LOST, FinishReason.HANDED_BACK)

    def __str__(self) -> str:
        return self.name.lower()


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    """One sequence to generate, already tokenized.

    ``output_token_ids`` are tokens that an earlier replica has delivered: generation goes on after them, with
    the same draws, and delta indexes count from their end. ``cache_salt`` comes from the authenticated tenant.
    Lower ``priority`` runs first, as in vLLM. ``arrival`` is the sender's wall clock in seconds.
    ``tenant`` shares fairly with others of its priority, in proportion to ``share``; empty: the common one.
    ``deadline`` is the sender's wall clock by which it must be done; 0: none.
    ``age`` is above 0 for a request that another replica had accepted: seconds since then. It is not refused for want
    of room, and waits as if it had come that long ago.
    """

    request_id: RequestId
    prompt_token_ids: list[int]
    params: SamplingParams
    output_token_ids: list[int] = field(default_factory=list[int])
    priority: int = 0
    cache_salt: str = ""
    arrival: float = 0.0
    tenant: str = ""
    share: float = 1.0
    deadline: float = 0.0
    age: float = 0.0
    packed_prompt: bytes = field(default=b"", repr=False, compare=False)
    """``prompt_token_ids`` as ``hashing.pack_tokens`` makes them, from who has packed them already."""
    session: str = ""
    """Requests with the same one had better go to the same replica; empty: none. It does not travel there."""
    admitted: bool = field(default=False, compare=False)
    """The router may not refuse it: another sequence of the same client's request was let in for it."""
    company_tokens: int = field(default=0, compare=False)
    """Prompt tokens of the sequences that will be let in with it. Neither travels."""
    trace: str = ""
    """W3C ``traceparent`` of the span that its spans belong under; empty: nobody traces it."""
    is_suspect: bool = False
    """It may be what ends replicas: one replica takes one of these at a time."""

    @property
    def seed(self) -> int:
        """Of its draws: the one it brings, or one that follows from its id."""
        own = self.params.seed
        return derived_seed(self.request_id) if own is None else own


def derived_seed(request_id: RequestId) -> int:
    """A seed, 63 bits, for a request that nobody gave one."""
    return int.from_bytes(blake2b(request_id.encode(), digest_size=8).digest(), "little") >> 1


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log-probability of the token at one position and of the likeliest alternatives, best first."""

    token_id: int
    logprob: float
    rank: int
    """1 is the likeliest."""
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstTokenReport:
    """Where the time before a first token went, in seconds, and what was expected of the cache."""

    queue_s: float
    """In the replica, before its first step."""
    prefill_s: float
    """From there to the first token."""
    router_s: float = 0.0
    """In the router, before it was bound to a replica. This and what follows is stamped by the dispatcher."""
    predicted_tokens: int = 0
    """Prompt tokens that were expected in the replica's cache."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenDelta:
    """News of one request after one engine step.

    ``index`` is the position of ``token_ids[0]`` in the request's output, so that a receiver can drop
    what it has already seen. ``cached_tokens`` (prompt tokens whose KV was found) is set on the first delta.
    ``stop_reason`` is the stop token's id if one ended the request.
    """

    request_id: RequestId
    index: int
    token_ids: list[int]
    logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: list[TokenLogprob | None] | None = None
    cached_tokens: int | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None
    error: str | None = None
    replica: ReplicaId | None = None
    """Who computed it: stamped by the dispatcher on the first delta, and on the first one after a move."""
    report: FirstTokenReport | None = None
    """On the first delta."""
    embedding: bytes | None = None
    """float32, little-endian, on the last delta of a request with ``pooling``."""
    weights_version: str | None = None
    """Which weights it came from: on a replica's first delta, and whenever they have changed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What a replica says of itself with every word it sends."""

    running: int = 0
    waiting: int = 0
    waiting_tokens: int = 0
    """Uncomputed prompt tokens of waiting and running requests."""
    kv_used_blocks: int = 0
    """Blocks that running requests hold; cached blocks that nobody holds are free."""
    kv_total_blocks: int = 1
    max_num_seqs: int = 1
    num_drafts: int = 0
    """Drafts verified since the start, one for each sequence in a step that had some."""
    num_draft_tokens: int = 0
    accepted_by_place: tuple[int, ...] = ()
    """How often a draft's first, second … token was accepted."""

    @property
    def kv_usage(self) -> float:
        """Share of KV memory held by running requests, 0..1."""
        return self.kv_used_blocks / self.kv_total_blocks


WeightsIdentity = tuple[str, str, str]
"""Version of the weights, their form, and that of cached keys and values."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankInfo:
    """What is known of one rank of a replica's gang."""

    rank: int
    stage: int
    host: str
    pid: int
    memory_bytes: int
    last_step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaInfo:
    """What a replica announces when it is ready, and repeats as its lease."""

    replica: ReplicaId
    epoch: Epoch
    model: str
    address: str
    """``host:port`` of its channel."""
    kv_namespace: bytes
    """Root of its block hashes without a tenant's salt."""
    block_size: int
    kv_total_blocks: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    prefill_tokens_per_s: float
    """Measured at start."""
    decode_step_s: float
    """Measured at start: one step of a single stream."""
    node: str = ""
    pid: int = 0
    kernels: str = ""
    """What computes: native kernels of an instruction set, or torch."""
    weights_format: str = ""
    weights_version: str = ""
    """Which weights these are."""
    kv_format: str = ""
    num_threads: int = 0
    """CPU threads that compute, in all ranks together."""
    ranks: tuple[RankInfo, ...] = ()
    """The processes that the model is cut over; none where it runs in the replica's own."""

    @property
    def weights(self) -> WeightsIdentity:
        """What tells whether another replica would have computed the same."""
        return self.weights_version, self.weights_format, self.kv_format

    def computes_as(self, other: "ReplicaInfo") -> bool:
        """Whether a sequence that the other has begun comes out here as it would have there."""
        return self.model == other.model and self.weights == other.weights


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCard:
    """What a client must know of a served model. Replicas put it on the bus, so that clients need no files."""

    model: str
    names: tuple[str, ...]
    """All names it is served under, ``model`` among them."""
    tokenizer: dict[str, Any]
    max_model_len: int
    vocab_size: int
    """Rows of the model's embedding; the tokenizer may know fewer ids."""
    token: str = field(repr=False)
    """Secret of the channels: whoever may read the bus may submit."""
    routing_policy: str
    late_binding_backlog: float = 0.4
    """Seconds of prefill above which requests wait in the router."""
    max_replica_losses: int = 3
    """Replicas lost with a request on them after which it is not tried on another one."""
    seed: int | None = None
    """Base of the seeds of requests that bring none; None: random."""
    limits: dict[str, float] = field(default_factory=dict[str, float])
    """``TimeLimits`` by key: what is absent has its default."""
    overload: dict[str, float] = field(default_factory=dict[str, float])
    """``OverloadConfig`` by key."""
    max_num_queued_reqs: int = 1024
    """Requests for each replica that may wait in a router."""
    tool_call_parser: str = "auto"
    """Name of the format of its tool calls."""
    channel_tls: dict[str, str] = field(default_factory=dict[str, str])
    """Paths of the channels' certificate, key and authorities, on every host; empty: plain TCP."""
    weights: dict[str, str | None] = field(default_factory=dict[str, str | None])
    """Fields of the ``NewWeights`` that replicas have been given since they started: whoever starts takes them, too."""
    build: str = ""
    """Of the application: while it is renewed, replicas of two builds have a card of the same model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StartupNote:
    """How far a replica is with ``stage``; ``failed`` holds the reason when it cannot start."""

    stage: str
    done: int = 0
    total: int = 0
    failed: str | None = None
