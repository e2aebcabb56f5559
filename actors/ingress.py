"""The HTTP door: a Serve deployment that holds the clients' streams."""

from pydantic import SecretStr
from ray.serve.handle import DeploymentHandle
from starlette.types import ASGIApp

from ..cluster.config import WarmrootConfig
from ..router.openai.app import build_app
from ..router.openai.settings import ApiKey, ApiSettings
from .cluster_client import ClusterClient
from .embedded_bus import open_bus


class Ingress:
    """Serves the OpenAI API for one model over the cluster's replicas."""

    async def __init__(self, config: WarmrootConfig, _replicas: DeploymentHandle, token: str) -> None:
        """``_replicas`` makes Serve start the replicas with the ingress; requests do not go through it.

        ``token`` is the secret of their channels.
        """
        self._config = config
        self._client = await ClusterClient.connect(
            open_bus(config),
            token=token,
            timeout_s=config.limits.replica_start_timeout,
            record_trace=config.routing.record_trace,
        )

    def __serve_build_asgi_app__(self) -> ASGIApp:
        """Called by Serve once the constructor is through."""
        server = self._config.server
        settings = ApiSettings(
            api_keys=tuple(ApiKey(key=SecretStr(key), tenant=tenant) for key, tenant in server.all_keys),
            max_body_bytes=server.max_body_bytes,
            allowed_origins=server.allowed_origins,
            root_path=server.root_path,
            sends_request_id=False,
            keep_alive_s=self._config.limits.keep_alive_interval,
        )
        names = self._config.model.names
        return build_app(dict.fromkeys(names, self._client.frontend), settings, self._client.dispatcher)

    async def __del__(self) -> None:
        await self._client.close()
