"""``POST /admin/update_weights``: other weights for a model that runs."""

import secrets
from dataclasses import asdict
from typing import Any

from fastapi import APIRouter
from pydantic import BaseModel, ConfigDict, Field

from ...cluster.errors import ModelNotFoundError, ReplicaUnavailableError
from ...cluster.weights_update import NewWeights, UpdateMode
from ..weights_updater import WeightsUpdater
from .documentation import ERRORS
from .service import Service

VERSION_PATTERN = r"^[A-Za-z0-9._:+-]{1,64}$"


class UpdateWeightsRequest(BaseModel):
    """Which weights, for which model, and how."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    model: str | None = None
    """A served name; default: the first."""
    weights: str | None = Field(None, min_length=1)
    """Model folder, GGUF file or hub id of a checkpoint of the same architecture, there on every node."""
    revision: str | None = None
    """Branch, tag or commit of a hub id."""
    actor: str | None = Field(None, min_length=1)
    """Instead of ``weights``: name of a Ray actor that has the tensors, or ``namespace/name``."""
    version: str | None = Field(None, pattern=VERSION_PATTERN)
    """Name of the weights: replicas that hold it already do nothing. Default: a checkpoint's fingerprint, or a new
    name."""
    mode: UpdateMode = "wait"
    """What becomes of running requests: ``wait`` for their end, ``abort`` them, or go on ``in_place``."""
    one_by_one: bool = False
    """Replicas change one after the other, so that the others go on; default: all at once."""
    timeout: float = Field(600.0, gt=0, le=86400.0)
    """Seconds that running requests have to end with ``wait``."""

    def new_weights(self) -> NewWeights:
        """Raises InvalidRequestError unless there is one origin."""
        made = f"{self.actor}-{secrets.token_hex(4)}"[-64:] if self.actor else ""
        return NewWeights(
            version=self.version or made.replace("/", "."),
            model=self.weights or "",
            revision=self.revision,
            actor=self.actor or "",
        )


def weights_routes(service: Service) -> APIRouter:
    """``/admin/update_weights``."""
    router = APIRouter(prefix="/admin", tags=["admin"])

    def updater(name: str | None) -> WeightsUpdater:
        updaters = service.updaters
        if not updaters:
            raise ReplicaUnavailableError("no model is ready yet")
        if name is None:
            return next(iter(updaters.values()))
        if name not in updaters:
            raise ModelNotFoundError(f"the model {name[:200]!r} does not exist", param="model")
        return updaters[name]

    @router.post("/update_weights", responses=ERRORS)
    async def update_weights(body: UpdateWeightsRequest) -> dict[str, Any]:
        """Load weights beside those in use on every replica, then change; answers when all have changed.

        If anything fails before the change, all replicas stay as they were.
        """
        report = await updater(body.model).update(
            body.new_weights(), mode=body.mode, one_by_one=body.one_by_one, timeout_s=body.timeout
        )
        return asdict(report)

    return router
