"""Models, health, load, version and metrics."""

from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import APIRouter, Request
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import PlainTextResponse, Response

from ...cluster.errors import ReplicaUnavailableError
from ..tenancy.principal import Principal
from .documentation import errors
from .protocol import ErrorBody, ModelCard, ModelList
from .record import principal_of
from .service import Service


def model_routes(service: Service) -> APIRouter:
    """``/v1/models``."""
    router = APIRouter(tags=["models"])
    created = int(service.clock())

    def card(name: str, principal: Principal) -> ModelCard:
        _, frontend = service.model(name, principal, param=None)
        replicas = [replica.info for replica in service.cluster.replicas() if replica.info.model == frontend.model]
        return ModelCard(
            id=name,
            created=created,
            root=frontend.model,
            max_model_len=frontend.max_model_len,
            weights_versions=sorted({info.weights_version for info in replicas if info.weights_version}),
        )

    @router.get("/v1/models")
    async def list_models(request: Request) -> ModelList:
        """The served models that the key is for."""
        principal = principal_of(request.scope)
        return ModelList(data=[card(name, principal) for name in service.models(principal)])

    @router.get("/v1/models/{model:path}", responses=errors(404, 503))
    async def retrieve_model(request: Request, model: str) -> ModelCard:
        """One served model."""
        return card(model, principal_of(request.scope))

    return router


def health_routes(service: Service) -> APIRouter:
    """``/health`` and its kin: for probes, load balancers and scrapers."""
    router = APIRouter(tags=["status"])

    @router.get("/livez", response_class=Response)
    async def live() -> Response:
        """200 as long as this process answers."""
        return Response()

    async def ready() -> Response:
        """200 when a replica is ready, or would be started for a request; 503 before."""
        if not service.ready():
            raise ReplicaUnavailableError("no replica is ready")
        return Response()

    for path in ("/health", "/readyz", "/ping"):
        _add_probe(router, path, "GET", ready)
    _add_probe(router, "/ping", "POST", ready)

    @router.get("/version")
    async def version() -> dict[str, str]:
        """The version of the server."""
        return {"version": service.version}

    @router.get("/load")
    async def load() -> dict[str, Any]:
        """Sequences in the replicas, altogether and one by one."""
        replicas = [
            {
                "replica": replica.info.replica,
                "model": replica.info.model,
                "state": replica.state.value,
                "running": replica.load.running,
                "waiting": replica.load.waiting,
                "kv_cache_usage": replica.load.kv_usage,
                "kernels": replica.info.kernels,
                "weights_format": replica.info.weights_format,
                "kv_format": replica.info.kv_format,
                "num_threads": replica.info.num_threads,
            }
            for replica in service.cluster.replicas()
        ]
        total = sum(replica.load.running + replica.load.waiting for replica in service.cluster.replicas())
        return {"server_load": total, "replicas": replicas}

    @router.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> Response:
        """Prometheus text."""
        return Response(await service.metrics.scrape(), media_type=CONTENT_TYPE_LATEST)

    return router


def _add_probe(router: APIRouter, path: str, method: str, ready: Callable[[], Awaitable[Response]]) -> None:
    """A route that answers 200 or 503 and nothing else."""
    router.add_api_route(
        path,
        ready,
        methods=[method],
        response_class=Response,
        responses={503: {"model": ErrorBody, "content": {"application/json": {}}}},
        operation_id=f"{path[1:]}_{method.lower()}",
    )
