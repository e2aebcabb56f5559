"""The Serve config of an application: what KubeRay takes as ``serveConfigV2``, and ``serve deploy`` as a file."""

from typing import Any

from ..cluster.application_args import HTTP_OPTIONS, application_args
from ..cluster.config import WarmrootConfig

APP_NAME = "warmroot"
INGRESS_DEPLOYMENT = "Ingress"
REPLICA_DEPLOYMENT = "Replica"
IMPORT_PATH = "warmroot.deploy.app:build_app"
ANY_ADDRESS = "0.0.0.0"
"""In a cluster the endpoint is for others, unless a host is given."""


def serve_config(config: WarmrootConfig, name: str = APP_NAME) -> dict[str, Any]:
    """As plain values. Raises ConfigError for keys that do not belong there, such as secrets.

    Numbers of copies stand beside the deployments: Serve builds an application with other arguments anew, while other
    numbers only add or remove copies.
    """
    server = config.server
    options = {key: getattr(server, key) for key in HTTP_OPTIONS if key in server.model_fields_set}
    copies = {INGRESS_DEPLOYMENT: server.num_ingress, REPLICA_DEPLOYMENT: config.deploy.num_replicas}
    args = application_args(config)
    application = {
        "name": name,
        "route_prefix": server.root_path or "/",
        "import_path": IMPORT_PATH,
        "args": {key: value for key, value in args.items() if key not in ("num_ingress", "num_replicas")},
        "deployments": [{"name": deployment, "num_replicas": number} for deployment, number in copies.items()],
    }
    return {
        "proxy_location": "EveryNode",
        "http_options": {"host": ANY_ADDRESS, "port": server.port, **options},
        "applications": [application],
    }
