"""The FastAPI application of an ingress."""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from importlib.metadata import version

from fastapi import FastAPI
from starlette.middleware import Middleware

from ...kv_store.quota import QuotaStore
from ..frontend import Frontend
from ..json_lines import JsonLines
from ..metrics import RequestMetrics
from ..tenancy.rate_limits import KINDS
from ..tracing import Tracing
from ..weights_updater import WeightsUpdater
from .cluster_state import ClusterState
from .documentation import DocumentedApp
from .ends import RequestEnds
from .errors import install_error_handlers
from .middleware import CrossOrigin, RequestBoundary
from .middleware_access import Access
from .middleware_audit import Audited
from .middleware_body import BodyLimit, HeaderLimit
from .middleware_limits import RateLimits
from .routes_admin import admin_routes
from .routes_chat import chat_routes
from .routes_completions import completion_routes
from .routes_console import console_files, console_paths, console_routes
from .routes_embeddings import embedding_routes
from .routes_responses import response_routes
from .routes_status import health_routes, model_routes
from .routes_weights import weights_routes
from .service import Service, random_id
from .settings import ApiSettings
from .tenancy import Tenancy
from .tokens import token_routes

EXPOSED_HEADERS = (
    "x-request-id",
    "x-warmroot-replica",
    "x-warmroot-cached-tokens",
    "x-warmroot-weights-version",
    "x-warmroot-routing",
    "openai-processing-ms",
    "retry-after",
    "retry-after-ms",
    *(f"x-ratelimit-{fact}-{kind}" for fact in ("limit", "remaining", "reset") for kind in KINDS),
)


def build_app(
    frontends: Mapping[str, Frontend],
    settings: ApiSettings,
    cluster: ClusterState,
    *,
    clock: Callable[[], float] = time.time,
    monotonic: Callable[[], float] = time.perf_counter,
    new_id: Callable[[], str] = random_id,
    shared_quota: QuotaStore | None = None,
    tracing: Tracing | None = None,
    updaters: Mapping[str, WeightsUpdater] | None = None,
) -> FastAPI:
    """The OpenAI-compatible API over ``frontends``, by served name; a name may be added while it runs.

    ``clock`` is the wall clock and ``monotonic`` measures durations, both in seconds. ``shared_quota``: where ingresses
    keep the limits of keys together. ``tracing`` makes spans of requests. ``updaters`` change models' weights, by
    served name as ``frontends``. Raises ConfigError for a file of API keys that cannot be read.
    """
    service = Service(
        frontends=frontends,
        cluster=cluster,
        metrics=RequestMetrics(cluster, settings.ingress),
        settings=settings,
        version=version("warmroot"),
        clock=clock,
        monotonic=monotonic,
        new_id=new_id,
        updaters={} if updaters is None else updaters,
    )
    tenancy = Tenancy.of(settings, clock=clock, monotonic=monotonic, shared_quota=shared_quota)
    service.metrics.registry.register(tenancy.collector())
    request_log = None if settings.request_log is None else JsonLines(settings.request_log, "request log", monotonic)
    ends = RequestEnds(service.metrics, log=request_log, tracing=tracing, clock=clock)
    console = console_files()
    app = DocumentedApp(
        title="Warmroot",
        version=service.version,
        middleware=_middleware(service, tenancy, ends, console_paths(console)),
        lifespan=_closing([log for log in (tenancy.audit, request_log) if log is not None]),
        redoc_url=None,
        strict_content_type=False,
    )
    install_error_handlers(app)
    for routes in (
        chat_routes,
        completion_routes,
        response_routes,
        embedding_routes,
        model_routes,
        token_routes,
        health_routes,
        admin_routes,
        weights_routes,
    ):
        app.router.routes.extend(routes(service).routes)  # an included router would match each request twice
    app.router.routes.extend(console_routes(console).routes)
    return app


def _closing(logs: Sequence[JsonLines]) -> Callable[[FastAPI], AbstractAsyncContextManager[None]]:
    """Whoever runs the application ends it, too: then what waits for the disk is written."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncGenerator[None, None]:
        yield
        for log in logs:
            await asyncio.to_thread(log.close)

    return lifespan


def _middleware(service: Service, tenancy: Tenancy, ends: RequestEnds, console: frozenset[str]) -> list[Middleware]:
    """From the outside in."""
    settings, audit = service.settings, tenancy.audit
    clocks = {"clock": service.clock, "monotonic": service.monotonic}
    return [
        Middleware(RequestBoundary, new_id=service.new_id, clock=service.monotonic, settings=settings, ends=ends),
        Middleware(
            CrossOrigin,
            allow_origins=settings.allowed_origins,
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=EXPOSED_HEADERS,
        ),
        *([] if audit is None else [Middleware(Audited, log=audit, **clocks)]),
        Middleware(HeaderLimit, max_bytes=settings.limits.max_header_bytes),
        Middleware(
            Access,
            keys=tenancy.keys,
            open_admin=settings.open_admin,
            open_metrics=not settings.protect_metrics,
            console=console,
        ),
        Middleware(RateLimits, limiter=tenancy.limiter),
        Middleware(BodyLimit, max_bytes=settings.max_body_bytes, max_values=settings.limits.max_json_values),
    ]
