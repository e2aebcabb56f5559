"""``GET /admin/state``: what the console, ``warmroot top`` and ``warmroot status`` show. Its size is bounded."""

from collections.abc import Mapping
from typing import Any

from pydantic import ConfigDict, Field

from .protocol import ResponseBody


class StateBody(ResponseBody):
    """A part of the state."""


class FiguresBody(StateBody):
    """How sequences have fared lately. Times are in seconds; None where there were none."""

    span_s: float
    """Of these latest seconds, at most 60."""
    requests_per_s: float
    """Sequences that got a first token."""
    failed_per_s: float
    """Sequences refused or failed, for want of room, time or an engine."""
    output_tokens_per_s: float
    """Tokens generated."""
    hit_rate: float | None
    """Share of prompt tokens that were cached."""
    ttft_p50_s: float | None
    """Time to first token, from the router's receipt of the prompt."""
    ttft_p95_s: float | None
    """The same of the slowest twentieth."""
    itl_p50_s: float | None
    """Time between deltas."""
    itl_p95_s: float | None
    """The same of the slowest twentieth."""


class TotalsBody(FiguresBody):
    """All routers together."""

    running: int
    """Sequences that replicas compute now."""
    waiting: int
    """Sequences that wait in replicas, or in this ingress for one."""


class IngressBody(StateBody):
    """Which of the ingresses answers. Decisions are its own; figures, replicas and prefixes are the cluster's."""

    host: str
    """Name of its machine."""
    pid: int
    """Its process."""


class RouterBody(StateBody):
    """A router of one model: of this ingress, of another one, or of a handle."""

    name: str
    """Told from all others by it."""
    model: str
    """Whose replicas it chooses from."""
    is_own: bool
    """Whether it is of the ingress that answers."""
    in_flight: int
    """Sequences that it has in replicas."""
    silent_s: float
    """Seconds since it was heard."""
    figures: FiguresBody
    """Of its sequences alone."""


class StoreBody(StateBody):
    """The metadata store, and what this ingress learned from it."""

    store: str
    """Where it is, without secrets; ``embedded`` without Redis."""
    fault: str
    """Why it cannot be read now; empty: it can."""
    index_blocks: int
    """Distinct blocks that the prefix index knows."""
    gaps: int
    """Batches of events that did not follow what was known, since start."""
    skipped: int
    """Batches that could not be read, since start."""
    conflicts: int
    """Batches that contradicted what was known, since start."""
    resyncs: int
    """Replicas asked anew as the index was wrong of them, since start."""
    silent: int
    """Replicas that live and do not tell what they hold."""
    lag_p50_s: float | None = None
    """Time of events from a replica to the index, at most; since start. None where none came, or beyond measure."""
    lag_p95_s: float | None = None
    """The same of the slowest twentieth."""


class RankBody(StateBody):
    """A process of a replica's gang."""

    rank: int
    """Its number in the gang."""
    stage: int
    """Its pipeline stage."""
    host: str
    """Its node."""
    pid: int
    """Its process."""
    memory_bytes: int
    """Memory that it uses."""
    last_step: int
    """Number of its latest step."""


class ReplicaBody(StateBody):
    """A replica: all that it announced, and what it does now."""

    model_config = ConfigDict(extra="allow", use_attribute_docstrings=True, protected_namespaces=())

    replica: str
    """Its id."""
    model: str
    """What it serves."""
    state: str
    """``starting``, ``ready``, ``draining`` or ``unhealthy``."""
    node: str
    """Where it runs."""
    running: int
    """Sequences that it computes."""
    waiting: int
    """Sequences that wait in it."""
    waiting_tokens: int
    """Prompt tokens that it has to compute."""
    max_num_seqs: int
    """Sequences that it computes at once, at most."""
    kv_used_blocks: int
    """Blocks of KV that running sequences hold."""
    kv_total_blocks: int
    """All blocks."""
    kv_cache_usage: float
    """Share of blocks that running sequences hold."""
    cached_blocks: int
    """Blocks that nobody holds and its prefix cache keeps."""
    hit_rate: float | None
    """Share of prompt tokens that it had cached, of this ingress's requests of the last minute."""
    kv_format: str
    """How keys and values are kept."""
    kernels: str
    """What computes."""
    weights_format: str
    """How weights are kept."""
    weights_version: str
    """Which weights these are."""
    ranks: list[RankBody]
    """The processes of its gang; none where the model runs in the replica's own."""


class PrefixBody(StateBody):
    """A run of cached tokens that the same replicas hold; nodes come parents first."""

    id: str
    """Told from all others by it."""
    parent: str | None
    """The node that it continues."""
    namespace: str
    """Told from other trees by it: model, weights, KV format and tenant."""
    model: str
    """Whose cache it is in."""
    is_private: bool
    """Only a tenant, a group or a client with a salt of its own finds it."""
    tenants: list[str]
    """Those who are known to share a private one."""
    depth: int
    """Tokens before it."""
    num_tokens: int
    """Tokens that it has."""
    num_children: int
    """Nodes that continue it, those that are not shown among them."""
    age: int
    """0 for what was stored last; higher before."""
    heat: float
    """Prompt tokens saved per second by it and what continues it, as far as that is known."""
    replicas: list[str]
    """Who holds it."""
    text: str | None
    """How it begins; None where ``--prompt-previews`` does not allow that."""


class UpdateBody(StateBody):
    """Weights that are changing."""

    model: str
    """Whose."""
    stage: str
    """What the update is at."""


class CandidateBody(StateBody):
    """A replica that could have been chosen."""

    replica: str
    """Its id."""
    cost: float
    """In the policy's unit: seconds for ``warm_prefix``."""
    cached_tokens: int
    """Prompt tokens that were expected in its cache."""
    reason: str
    """The policy's word for it."""


class DecisionBody(StateBody):
    """Why a request went where it went."""

    request_id: str
    """Begins with the id of the response."""
    at: float
    """Seconds since the epoch."""
    prompt_tokens: int
    """Length of the prompt."""
    replica: str | None
    """Who gave the first token; None before it."""
    reason: str
    """The policy's word."""
    predicted_tokens: int
    """Prompt tokens expected in that replica's cache."""
    actual_tokens: int | None
    """Prompt tokens found there."""
    decided_in_s: float
    """Time that the choice took."""
    refusals: list[str]
    """What those said who did not take it."""
    num_candidates: int
    """Replicas that could have been chosen, those that are not listed among them."""
    candidates: list[CandidateBody]
    """The best ones, best first."""


class ScalingBody(StateBody):
    """A decision of the autoscaler."""

    at: float
    """Seconds since the epoch."""
    model: str
    """Whose replicas are meant."""
    before: int
    """Replicas wanted until then."""
    after: int
    """Replicas wanted from then on."""
    reason: str
    """Why."""


class AutoscalerBody(StateBody):
    """What the autoscaler makes of the work now."""

    model: str
    """Whose replicas are meant."""
    at: float
    """Seconds since the epoch."""
    ready: int
    """Replicas that were ready."""
    target: int
    """Replicas that there shall be."""
    needed: float
    """Replicas that the strongest signal needs."""
    signal: str
    """Which one that is."""
    reasons: list[str]
    """In sentences, the decisive one first."""


class AdminState(StateBody):
    """The cluster as one ingress sees it."""

    version: str
    """Of the software."""
    at: float
    """Seconds since the epoch, as it answers."""
    ready: bool
    """Whether a request would be served."""
    models: list[str]
    """Served names."""
    server_load: int
    """Sequences in replicas."""
    ingress: IngressBody
    """Who answers."""
    totals: TotalsBody
    """How requests fare, over all ingresses that are heard."""
    routers: list[RouterBody]
    """The ingress's own and those that it hears."""
    routing: Mapping[str, Any] = Field(default_factory=dict[str, Any])
    """Counts of this ingress since its start; ``docs/routing.md`` has them as metrics."""
    metadata_store: StoreBody
    """Redis, or what stands in for it."""
    replicas: list[ReplicaBody]
    """Every known replica."""
    updates: list[UpdateBody]
    """Of weights, that this ingress was asked for and are under way."""
    previews: str
    """Whose prompts' beginnings are shown: ``none``, ``shared`` or ``all``."""
    prefixes: list[PrefixBody]
    """Hot prefixes and the latest."""
    decisions: list[DecisionBody]
    """The latest, newest first."""
    autoscalers: list[AutoscalerBody]
    """One for each model whose number of replicas follows the work."""
    scaling: list[ScalingBody]
    """The autoscaler's latest decisions, newest first."""
