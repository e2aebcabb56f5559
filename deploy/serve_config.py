"""The Serve config of an application: what KubeRay takes as ``serveConfigV2``, and ``serve deploy`` as a file."""

from typing import Any

from ..cluster.application_args import HTTP_OPTIONS, application_args
from ..cluster.config import WarmrootConfig

IMPORT_PATH = "warmroot.deploy.app:build_app"
ANY_ADDRESS = "0.0.0.0"
"""In a cluster the endpoint is for others, unless a host is given."""


def serve_config(config: WarmrootConfig, name: str = "warmroot") -> dict[str, Any]:
    """As plain values. Raises ConfigError for keys that do not belong there, such as secrets."""
    server = config.server
    options = {key: getattr(server, key) for key in HTTP_OPTIONS if key in server.model_fields_set}
    application = {
        "name": name,
        "route_prefix": server.root_path or "/",
        "import_path": IMPORT_PATH,
        "args": application_args(config),
    }
    return {
        "proxy_location": "EveryNode",
        "http_options": {"host": ANY_ADDRESS, "port": server.port, **options},
        "applications": [application],
    }
