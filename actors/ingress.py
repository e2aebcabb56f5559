"""The HTTP door: a Serve deployment that holds the clients' streams."""

import asyncio
import logging
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

from pydantic import SecretStr
from ray import serve
from ray.serve.handle import DeploymentHandle
from starlette.types import ASGIApp

from ..cluster.config import WarmrootConfig
from ..cluster.errors import ReplicaUnavailableError
from ..cluster.messages import ModelCard
from ..kv_store.bus import ClusterBus
from ..kv_store.redis_bus import RedisEventBus
from ..router.frontend import Frontend
from ..router.logs import set_up_logging
from ..router.openai.app import build_app
from ..router.openai.cluster_state import ClusterState
from ..router.openai.settings import ApiKey, ApiSettings
from ..router.several_models import SeveralModels
from ..router.tracing import tracing
from ..router.weights_updater import WeightsUpdater
from .cluster_client import ClusterClient
from .embedded_bus import open_bus, store_of
from .model_card import read_card
from .serve_port import listen_at_node_address

logger = logging.getLogger(__name__)


class Ingress:
    """Serves the OpenAI API over the cluster's replicas of one or several models.

    It opens with the first model that is up; until then, and until they are up too, the others answer 503. A model
    that may have no replica is up at once: its requests wait for the replica that is started for them.
    """

    async def __init__(
        self,
        configs: Sequence[WarmrootConfig],
        _replicas: Sequence[DeploymentHandle],
        token: str,
        open_admin: bool = False,
        build: str = "",
    ) -> None:
        """``configs``: one for each model, the first one's for all that is the ingress's own.

        ``_replicas`` makes Serve start the replicas with the ingress; requests do not go through it. ``token`` is the
        secret of their channels. ``open_admin``: without any keys, whoever reaches this is an admin. ``build``: of the
        application; models are served as that one's replicas describe them.
        """
        listen_at_node_address()
        set_up_logging(configs[0].observability)
        self._tracing = tracing(configs[0].observability.otlp_traces_endpoint, "warmroot-ingress")
        self._configs = configs
        self._token = token
        self._build = build
        self._open_admin = open_admin
        self._clients: dict[str, ClusterClient] = {}
        self._frontends: dict[str, Frontend] = {}
        self._updaters: dict[str, WeightsUpdater] = {}
        self._states: list[ClusterState] = []
        self._connecting = [asyncio.create_task(self._serve_once_up(config)) for config in configs]
        done, _ = await asyncio.wait(self._connecting, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()

    def __serve_build_asgi_app__(self) -> ASGIApp:
        """Called by Serve once the constructor is through."""
        store = store_of(self._configs[0])
        shared_quota = None if store is None else RedisEventBus(store)
        state = SeveralModels(self._states)
        return build_app(
            self._frontends,
            self._settings(),
            state,
            shared_quota=shared_quota,
            tracing=self._tracing,
            updaters=self._updaters,
        )

    def _settings(self) -> ApiSettings:
        config = self._configs[0]
        server = config.server
        return ApiSettings(
            api_keys=tuple(ApiKey(key=SecretStr(key), tenant=tenant) for key, tenant in server.all_keys),
            api_keys_file=server.api_keys_file,
            admin_keys=server.admin_api_key,
            open_admin=self._open_admin,
            protect_metrics=server.protect_metrics,
            num_ingress=server.num_ingress,
            ingress=serve.get_replica_context().replica_id.unique_id if server.num_ingress > 1 else "",
            audit_log=server.audit_log,
            prompt_previews=server.prompt_previews,
            request_log=config.observability.request_log,
            limits=config.requests,
            max_body_bytes=server.max_body_bytes,
            allowed_origins=server.allowed_origins,
            root_path=server.root_path,
            sends_request_id=False,
            keep_alive_s=config.limits.keep_alive_interval,
            waits_for_replicas=any(config.autoscaling.min_replicas == 0 for config in self._configs),
            served_names=tuple(name for config in self._configs for name in config.model.names),
        )

    async def __del__(self) -> None:
        for task in self._connecting:
            task.cancel()
        for client in self._clients.values():
            await client.close()
        if self._tracing is not None:
            await asyncio.to_thread(self._tracing.close)

    async def _serve_once_up(self, config: WarmrootConfig) -> None:
        """Of several models each has all the time that it takes: the others are served meanwhile."""
        while True:
            try:
                client = await self._connect(config)
                break
            except ReplicaUnavailableError as error:
                if len(self._configs) == 1:
                    raise
                logger.warning("%s; waiting on", error)
            except Exception:
                logger.exception("%s cannot be served", config.model.names[0])
                raise
        self._clients[config.model.names[0]] = client
        self._states.append(client.dispatcher)
        # In the order of the configuration, whichever is up first: a request without a name gets the first.
        clients = [(config, self._clients.get(config.model.names[0])) for config in self._configs]
        found = {name: client.frontend for config, client in clients if client for name in config.model.names}
        self._frontends.clear()
        self._frontends.update(found)
        self._updaters.update(dict.fromkeys(config.model.names, client.updater))

    async def _connect(self, config: WarmrootConfig) -> ClusterClient:
        bus = open_bus(config)
        try:
            card = await self._card_of(config, bus) if config.autoscaling.min_replicas == 0 else None
            return await ClusterClient.connect(
                bus,
                config.model.names[0],
                token=self._token,
                build=self._build,
                timeout_s=config.limits.replica_start_timeout,
                record_trace=config.routing.record_trace,
                card=card,
                channel_tls=config.tls.channel,
            )
        except BaseException:
            await bus.close()
            raise

    async def _card_of(self, config: WarmrootConfig, bus: ClusterBus) -> ModelCard:
        """What a replica would tell of the model if there were one: clients that find the bus need it, too."""
        card = replace(await asyncio.to_thread(read_card, config, self._token), build=self._build)
        with suppress(ConnectionError):  # the first replica brings it again
            await bus.put_card(card)
        return card
