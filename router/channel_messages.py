"""What ingress and replica say to each other; ``wire`` has the bytes."""

from dataclasses import dataclass, field
from typing import Any

from ..cluster.engine_counts import EngineCounts
from ..cluster.errors import WarmrootError
from ..cluster.ids import RequestId
from ..cluster.messages import GenerateRequest, Load, ReplicaInfo, TokenDelta

PROTOCOL_VERSION = 3
"""Raised when a peer of the release before could not make sense of a message. What is only added needs no raise: fields
come at the end, and whoever does not know them, or a kind of message, passes them over."""


@dataclass(frozen=True, slots=True)
class Hello:
    """First word of an ingress. ``token`` is the cluster's shared secret."""

    token: str
    version: int = PROTOCOL_VERSION


@dataclass(frozen=True, slots=True)
class HelloAck:
    """First word of a replica, once the token proved right."""

    info: ReplicaInfo
    load: Load


@dataclass(frozen=True, slots=True)
class Submit:
    """Generate this."""

    request: GenerateRequest


@dataclass(frozen=True, slots=True)
class Abort:
    """The client left."""

    request_id: RequestId


@dataclass(frozen=True, slots=True)
class Accepted:
    """Deltas of that request will follow."""

    request_id: RequestId
    load: Load


@dataclass(frozen=True, slots=True)
class Rejected:
    """No delta of that request will follow."""

    request_id: RequestId
    error: WarmrootError
    load: Load


@dataclass(frozen=True, slots=True)
class Deltas:
    """News of all the connection's requests after one engine step."""

    deltas: list[TokenDelta]
    load: Load


@dataclass(frozen=True, slots=True)
class Ping:
    """Are you there?"""


@dataclass(frozen=True, slots=True)
class Pong:
    """I am, and this busy; and so much was done since the start."""

    load: Load
    counts: EngineCounts = field(default_factory=EngineCounts)


@dataclass(frozen=True, slots=True)
class Draining:
    """The replica takes no more requests over this connection."""


@dataclass(frozen=True, slots=True)
class Ask:
    """Something besides generating, such as other weights. ``number`` comes back with the answer."""

    number: int
    what: str
    arguments: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Answer:
    """What became of it."""

    number: int
    result: dict[str, Any]
    error: WarmrootError | None = None


@dataclass(frozen=True, slots=True)
class Unknown:
    """Of a kind that only a later release knows."""


@dataclass(frozen=True, slots=True)
class Unreadable:
    """A request with parameters that only a later release knows: another replica may."""

    request_id: RequestId
    parameters: tuple[str, ...]


FromLater = Unknown | Unreadable


@dataclass(frozen=True, slots=True)
class Failure:
    """Why the sender closes the connection."""

    error: WarmrootError


Message = (
    Hello | HelloAck | Submit | Abort | Accepted | Rejected | Deltas | Ping | Pong | Failure | Draining | Ask | Answer
)
