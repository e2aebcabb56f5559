"""Other weights for a model that runs: what they are, and what becomes of requests that are running."""

from dataclasses import dataclass
from typing import Literal, get_args

from .errors import InvalidRequestError

UpdateMode = Literal["wait", "abort", "in_place"]
"""What becomes of requests that have begun: the change waits for their end; they end with what they have; they go on
with the new weights over keys and values of the old ones."""
UPDATE_MODES: tuple[str, ...] = get_args(UpdateMode)


@dataclass(frozen=True, slots=True, kw_only=True)
class NewWeights:
    """Weights of the same model: of a checkpoint, or tensors that a Ray actor has."""

    version: str = ""
    """Their name. A version names one set of weights: who holds it already has nothing to do. Empty: a checkpoint's
    fingerprint."""
    model: str = ""
    """Model folder, GGUF file or hub id, there on every node."""
    revision: str | None = None
    actor: str = ""
    """Name of the actor, or ``namespace/name``."""

    def __post_init__(self) -> None:
        if bool(self.model) == bool(self.actor):
            raise InvalidRequestError("new weights come from a model or from an actor: name one of them", param="model")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaWeights:
    """What a replica holds after an update."""

    replica: str
    weights_version: str
    seconds: float
    """From the word to change until it had changed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsReport:
    """How an update went that has reached every replica."""

    weights_version: str
    load_s: float
    """Until every replica had the new weights beside the old ones."""
    replicas: tuple[ReplicaWeights, ...]
    lost: tuple[str, ...] = ()
    """Replicas that were lost meanwhile: those that take their place begin with the new weights."""
