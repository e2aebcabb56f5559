"""What operators look at: the state of the cluster, and why requests went where they went."""

from dataclasses import asdict
from typing import Annotated, Any

from fastapi import APIRouter, Query, Response

from .admin_state import AdminState
from .service import Service
from .state_report import report

MOST_EXPLAINED = 1000
MOST_PREFIXES = 1000
MOST_DECISIONS = 200


def admin_routes(service: Service) -> APIRouter:
    """``/admin``."""
    router = APIRouter(prefix="/admin", tags=["admin"])

    @router.get("/state")
    async def state(
        response: Response,
        prefixes: Annotated[int, Query(ge=0, le=MOST_PREFIXES, description="Most nodes of the tree.")] = 200,
        decisions: Annotated[int, Query(ge=0, le=MOST_DECISIONS, description="Most decisions.")] = 50,
    ) -> AdminState:
        """Figures, replicas, hot prefixes with who holds them, and decisions: what the console shows."""
        response.headers["cache-control"] = "no-store"
        return report(service, prefixes=prefixes, decisions=decisions)

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
