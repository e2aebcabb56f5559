"""Starts Ray on this machine, or joins a running cluster, with the settings that serving needs."""

import logging
import os
import resource
import socket
import tempfile
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import ray
from ray._private import ray_constants, services, worker

from ..cluster.errors import ConfigError
from . import sweeper
from .ray_settings import LOOPBACK_VARIABLE, PORTS, SETTINGS, of_scratch

RAY_NAMESPACE = "warmroot"
SCRATCH_VARIABLE = "WARMROOT_SCRATCH"
"""Names the folder of the local cluster that this process started."""
# HAProxy's sockets live in a folder whose name Serve makes longer: a socket's path must stay under 97 characters.
_PARENT = Path("/tmp")


def ensure_ray(*, address: str | None, num_cpus: float, settings: Mapping[str, str] | None = None) -> bool:
    """Connect to ``address``, or start a local Ray with at least ``num_cpus``. True if this call started it.

    Nothing of a local Ray listens on other interfaces than loopback. ``settings`` are variables for its processes.
    """
    if ray.is_initialized():
        return False
    if address is not None:
        join_ray(address)
        return False
    sweeper.sweep_stale(_PARENT)
    _raise_file_limit()
    scratch = Path(tempfile.mkdtemp(prefix=_scratch_prefix(), dir=_PARENT))
    os.environ[SCRATCH_VARIABLE] = str(scratch)
    sweeper.watch(scratch)
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)
    try:
        with _variables({**own_places(scratch), **(settings or {}), sweeper.MARK: str(scratch)}), _loopback():
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


def join_ray(address: str) -> None:
    """Connect to a running cluster; ``auto`` finds one on this machine. Raises ConfigError when none answers."""
    try:
        with _loopback() if _keeps_to_loopback(address) else _variables({}):
            ray.init(address=address, namespace=RAY_NAMESPACE, log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, ValueError) as error:
        raise ConfigError(
            f"no Ray cluster answers at {address!r}; start one or leave --ray-address away", param="ray_address"
        ) from error


def own_places(scratch: Path) -> dict[str, str]:
    """Variables that keep one cluster's files and ports apart from every other's on this machine."""
    return {**of_scratch(scratch), **{name: str(free_port()) for name in PORTS}}


def started_here() -> bool:
    """Whether this process started the Ray that it is connected to."""
    # The variable is inherited: the process id tells a parent's cluster from one's own.
    return Path(os.environ.get(SCRATCH_VARIABLE, "")).name.startswith(_scratch_prefix())


def lost_daemons() -> list[str]:
    """Which daemons of the Ray that this process started have ended: raylet, gcs_server and others."""
    node = cast(Any, worker)._global_node
    return [] if node is None else [kind for kind, _ in node.dead_processes()]


def stop_local_ray() -> None:
    """Stop the Ray that this process started, with all that it may have left behind."""
    scratch = Path(os.environ.pop(SCRATCH_VARIABLE))
    if not lost_daemons():
        ray.shutdown()
    sweeper.sweep(scratch)
    ray.shutdown()  # after its daemons' end it may take seconds, but leaves Ray as if it had never been started


@contextmanager
def _variables(values: Mapping[str, str]) -> Generator[None, None, None]:
    """Have them in the environment: of what is started meanwhile, and of nothing that is started later."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@contextmanager
def _loopback() -> Generator[None, None, None]:
    """Have Ray take 127.0.0.1 as this node's address, here and in what it starts."""
    before, ray_constants.ENABLE_RAY_CLUSTER = ray_constants.ENABLE_RAY_CLUSTER, False
    try:
        with _variables({LOOPBACK_VARIABLE: "0"}):
            yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = before


def _keeps_to_loopback(address: str) -> bool:
    """Whether a cluster is reached at 127.0.0.1 only, which Ray would replace by the machine's address."""
    if address == "auto":
        address = services.get_ray_address_from_environment(address, None) or ""
    return address.rpartition(":")[0] in ("127.0.0.1", "localhost")


def _raise_file_limit() -> None:
    """A connection is an open file, and the soft limit is often 1024."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _scratch_prefix() -> str:
    return sweeper.FOLDERS.format(pid=os.getpid())


def free_port() -> int:
    """A TCP port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def check_port(host: str, port: int) -> None:
    """Raise ConfigError when the endpoint cannot listen there."""
    try:
        family, kind, _, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        with socket.socket(family, kind) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(place)
    except socket.gaierror as error:
        raise ConfigError(f"host {host!r}: {error.strerror}; give an address of this machine", param="host") from error
    except OSError as error:
        raise ConfigError(
            f"port {port} on {host} is in use ({error.strerror}); choose another with --port", param="port"
        ) from error
