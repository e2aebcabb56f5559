"""Brings a cluster up, shows how far it is, and takes it down again."""

import logging
import signal
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NoReturn

from ray import serve as ray_serve
from ray.exceptions import RayError
from ray.serve.schema import ApplicationStatus
from rich.console import Console

from ..actors.embedded_bus import open_bus, store_of
from ..actors.models.source import resolve_model
from ..actors.models.spec import model_len, read_layout
from ..actors.placement import could_fit, has_waiting_group, node_resources, what_is_missing
from ..cluster.config import WarmrootConfig
from ..cluster.errors import ModelLoadError, ReplicaUnavailableError
from ..kv_store.redis_bus import RedisEventBus
from ..router.openai.cluster_state import ReplicaStatus
from ..router.tenancy.key_file import read_key_file
from .app import APP_NAME, application, gang_bundles, replica_threads
from .certificates import check_certificates
from .handle import Handle, connect
from .last_line import last_line
from .local_ray import check_port, ensure_ray, lost_daemons, started_here
from .ray_settings import of_endpoint
from .runs_on import runs_on
from .startup_display import StartupDisplay
from .sync_bus import SyncBus
from .take_down import MARGIN_S, shutdown, uninterrupted

POLL_S = 0.1
LOOPBACK = "127.0.0.1"
WATCH_S = 0.5
"""How often it is looked whether Ray still runs."""
_PLACEMENT_S = 3.0
"""A gang that has not begun to load by then may lack something."""
_HEARSAY_S = 3.0
"""How long the announcement waits for what the bus has to tell."""


def run(config: WarmrootConfig | str, *, progress: bool = True, **keys: Any) -> Handle:
    """Start a cluster for ``config`` (or a model's name with flat configuration keys) and return a handle to it.

    Joins the Ray that this process is connected to, or the one at ``ray_address``, or starts one here. Raises
    ConfigError, ModelLoadError, or ReplicaUnavailableError when Serve cannot bring the replicas up.
    """
    config = WarmrootConfig.of(config, **keys) if isinstance(config, str) else config
    server, deploy, topology = config.server, config.deploy, config.parallel.topology()
    check_port(server.host, server.port)
    if server.api_keys_file is not None and deploy.ray_address is None:
        read_key_file(Path(server.api_keys_file))  # the ingress reads it, but its errors come late
    check_certificates(config.tls, ray_address=deploy.ray_address)
    logging.getLogger("ray.serve").setLevel(logging.WARNING)  # the display says what matters
    display = StartupDisplay(Console(stderr=True, quiet=not progress), config.first_replicas)
    with display:
        if deploy.ray_address is None:
            display.stage(f"finding {config.model.model}")
            _check_model(config)
        store = store_of(config)
        if store is not None:
            display.stage(f"finding {store}")
            with SyncBus(RedisEventBus(store)) as bus:
                bus.check()
        display.stage("starting Ray")
        wanted = deploy.num_cpus or config.most_replicas * replica_threads(config)
        sigterm = signal.getsignal(signal.SIGTERM)
        started_ray = ensure_ray(address=deploy.ray_address, num_cpus=wanted, settings=of_endpoint(config))
        _retake_sigterm(sigterm)
        try:
            display.stage("starting Serve")
            with SyncBus(open_bus(config)) as bus:
                bus.clear()
                location = "HeadOnly" if started_ray else "EveryNode"
                # HAProxy listens where the user wants it; the proxies behind it need no one else.
                host = LOOPBACK if started_ray else server.host
                ray_serve.start(http_options={"host": host, "port": server.port, "location": location})
                app = application([config], single_node=started_ray, open_admin=server.is_local)
                target = ray_serve.RunTarget(target=app, name=APP_NAME, route_prefix=server.root_path or "/")
                ray_serve.run_many([target], wait_for_applications_running=False)
                placement = None if topology.world_size == 1 else _Placement(config, started_ray)
                _wait_until_running(display, bus, placement, config.limits.replica_start_timeout)
        except BaseException as error:
            shutdown()
            if isinstance(error, RayError):
                raise ReplicaUnavailableError(f"Serve did not start: {last_line([str(error)])}") from error
            raise
    return connect(config.model.names[0])


def serve(config: WarmrootConfig) -> int:
    """Run until interrupted: what ``warmroot serve`` does. Returns the exit code."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _interrupt)
    console = Console(stderr=True)
    handle = run(config)
    code = 0
    try:
        _announce(console, config, handle)
        _wait_for_the_end_of_ray(console)
        code = 1
    except KeyboardInterrupt:
        console.print("stopping")
    finally:
        with uninterrupted():
            handle.close()
            shutdown(config.limits.shutdown_grace + MARGIN_S)
    return code


def _interrupt(number: int, frame: object) -> NoReturn:
    """SIGTERM stops a server as Ctrl-C does, once: what comes after it finds the server ending already."""
    for other in (signal.SIGINT, signal.SIGTERM):
        signal.signal(other, signal.SIG_IGN)
    raise KeyboardInterrupt


def _wait_for_the_end_of_ray(console: Console) -> None:
    """Return when the raylet that was started here has ended; of a Ray that was joined others take care.

    Without the GCS what runs goes on, until the raylet gives up waiting for it; nothing that fails comes back.
    """
    told: set[str] = set()
    while "raylet" not in told:
        time.sleep(WATCH_S)
        for lost in set(lost_daemons() if started_here() else ()) - told:
            console.print(f"Ray's {lost} has ended; what it said is in /tmp/ray/session_latest/logs")
            told.add(lost)
            if lost == "gcs_server":
                console.print("open streams go on for a minute; start warmroot serve again")


def _check_model(config: WarmrootConfig) -> None:
    """Download it if it must be, and refuse what cannot be served before Ray starts."""
    path = resolve_model(config.model.model, config.model.revision)
    parallel = config.parallel
    layout = read_layout(
        path,
        parallel.topology(),
        quantization=config.model.quantization,
        num_redundant_experts=parallel.num_redundant_experts,
    )
    model_len(layout.spec, config.model.max_model_len)


def _retake_sigterm(handler: Any) -> None:
    """Ray puts handlers of its own in front of what this process had; its core's prints a stack."""
    if threading.current_thread() is threading.main_thread():
        # A process without a handler gets that of Ray's Python side, which exits and cleans up.
        signal.signal(signal.SIGTERM, handler if callable(handler) else signal.getsignal(signal.SIGTERM))


def endpoint(config: WarmrootConfig) -> str:
    """Base URL of the HTTP API."""
    host = config.server.host
    host = LOOPBACK if host == "0.0.0.0" else "[::1]" if host == "::" else f"[{host}]" if ":" in host else host
    scheme = "http" if config.tls.ssl_certfile is None else "https"
    return f"{scheme}://{host}:{config.server.port}{config.server.root_path}"


def _announce(console: Console, config: WarmrootConfig, handle: Handle) -> None:
    url, name = endpoint(config), config.model.names[0]
    console.print(f"[bold]{name}[/] is served at [bold]{url}/v1[/] by {config.first_replicas} replica(s)")
    for line in runs_on(asdict(replica.info) for replica in _known_replicas(handle, config.first_replicas)):
        console.print("  " + line, highlight=False)
    console.print(f"  warmroot chat --url {url}      talk to it", highlight=False)
    console.print(f"  warmroot status --url {url}    look at its replicas", highlight=False)
    console.print(f"  {url}/docs                     the API        Ctrl-C stops it", highlight=False)


def _known_replicas(handle: Handle, wanted: int) -> Sequence[ReplicaStatus]:
    """What the handle knows of, which it hears from the bus a moment after the replicas are ready."""
    deadline = time.monotonic() + _HEARSAY_S
    while len(handle.replicas()) < wanted and time.monotonic() < deadline:
        time.sleep(0.02)
    return handle.replicas()


class _Placement:
    """Says what is missing while gangs find no place."""

    def __init__(self, config: WarmrootConfig, is_local: bool) -> None:
        self._bundles = gang_bundles(config)
        self._labels = config.deploy.label_selector
        self._num_replicas = config.first_replicas
        self._is_local = is_local
        self._due = time.monotonic() + _PLACEMENT_S
        self._said = ""

    def report(self, num_placed: int, display: StartupDisplay) -> None:
        """Raises ReplicaUnavailableError on a machine of our own, which will never have more than it has."""
        if num_placed >= self._num_replicas or time.monotonic() < self._due:
            return
        self._due = time.monotonic() + _PLACEMENT_S
        if not has_waiting_group():
            return
        nodes = node_resources(self._labels)
        missing = what_is_missing(self._bundles, nodes, self._labels)
        if self._is_local and not could_fit(self._bundles, nodes):
            raise ReplicaUnavailableError(missing)
        if missing != self._said:
            display.stage(missing)
        self._said = missing


def _wait_until_running(display: StartupDisplay, bus: SyncBus, placement: _Placement | None, within_s: float) -> None:
    """Follow the replicas' notes until Serve calls the application running."""
    deadline = time.monotonic() + within_s
    while True:
        notes = bus.notes()
        display.update(notes)
        if placement is not None:
            placement.report(len(notes), display)
        for note in notes.values():
            if note.failed is not None:
                raise ModelLoadError(note.failed)
        application = ray_serve.status().applications[APP_NAME]
        if application.status == ApplicationStatus.RUNNING:
            return
        if application.status == ApplicationStatus.DEPLOY_FAILED:
            details = [application.message, *(d.message for d in application.deployments.values())]
            raise ReplicaUnavailableError("Serve could not start the application: " + last_line(details))
        if time.monotonic() > deadline:
            raise ReplicaUnavailableError(f"not all replicas are up after {within_s:g} s (--replica-start-timeout)")
        time.sleep(POLL_S)
