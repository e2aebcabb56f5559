"""What operators look at: every replica, the processes that each consists of, and why requests went where they went."""

from dataclasses import asdict
from typing import Annotated, Any

from fastapi import APIRouter, Query

from .cluster_state import ReplicaStatus
from .service import Service

MOST_EXPLAINED = 1000


def admin_routes(service: Service) -> APIRouter:
    """``/admin``."""
    router = APIRouter(prefix="/admin", tags=["admin"])

    @router.get("/state")
    async def state() -> dict[str, Any]:
        """Replicas with what they are, what they do, and the ranks of their gangs."""
        replicas = service.cluster.replicas()
        return {
            "version": service.version,
            "ready": service.ready(),
            "models": list(service.frontends),
            "server_load": sum(replica.load.running + replica.load.waiting for replica in replicas),
            "metadata_store": asdict(service.cluster.store()),
            "replicas": [_describe(replica) for replica in replicas],
        }

    @router.get("/routing/explain")
    async def explain(
        request_id: Annotated[
            str, Query(description="Beginning of an id; the id of a response finds its request.")
        ] = "",
        limit: Annotated[int, Query(ge=1, le=MOST_EXPLAINED)] = 10,
    ) -> dict[str, Any]:
        """The latest choices of this ingress, newest first: candidates, costs and the reason."""
        return {"choices": [asdict(choice) for choice in service.cluster.explain(request_id, limit)]}

    return router


def _describe(replica: ReplicaStatus) -> dict[str, Any]:
    """A replica's facts and load; ``ranks`` is empty where its model runs in its own process."""
    facts = {key: value for key, value in asdict(replica.info).items() if key != "kv_namespace"}
    return {
        **facts,
        "state": replica.state.value,
        "running": replica.load.running,
        "waiting": replica.load.waiting,
        "waiting_tokens": replica.load.waiting_tokens,
        "kv_used_blocks": replica.load.kv_used_blocks,
        "kv_cache_usage": replica.load.kv_usage,
    }
