"""Deploys an application on a running Ray cluster by its REST API, as KubeRay does, and shows how far it is."""

import time
from collections.abc import Mapping
from typing import Any

import requests
from ray.dashboard.modules.serve.sdk import ServeSubmissionClient
from ray.serve.schema import ApplicationStatus
from rich.console import Console

from ..cluster.errors import ConfigError, ReplicaUnavailableError
from ..cluster.messages import StartupNote
from .last_line import last_line
from .serve_config import REPLICA_DEPLOYMENT
from .startup_display import StartupDisplay

POLL_S = 0.5
REACHED = "RUNNING"
"""A replica's state, as Serve names it."""

Details = Mapping[str, Any]


def submit(config: dict[str, Any], address: str, *, waits: bool = True, console: Console | None = None) -> None:
    """Deploy ``config``, which has one application, at the dashboard's ``address``; wait until it runs.

    Other applications that were deployed so stay as they are. Raises ConfigError when no cluster answers, and
    ReplicaUnavailableError when the application cannot be started.
    """
    client = _client(address)
    [application] = config["applications"]
    name, console = application["name"], console or Console(stderr=True)
    replicas = (one for one in application["deployments"] if one["name"].startswith(REPLICA_DEPLOYMENT))
    display = StartupDisplay(console, sum(_first_copies(one) for one in replicas))
    with display:
        display.stage(f"deploying {name} at {address}")
        before = client.get_serve_details()
        others = [other for other in _deployed(before) if other["name"] != name]
        try:
            client.deploy_applications({**config, "applications": [*others, application]})
        except RuntimeError as error:
            raise ConfigError(f"the cluster does not take it: {_first_line(error)}", param="address") from error
        if waits:
            _wait(client, name, _deployed_at(before, name), display)
    console.print(f"{name} {'is served' if waits else 'was taken by the cluster'}", highlight=False)


def _first_copies(deployment: Mapping[str, Any]) -> int:
    scaling = deployment.get("autoscaling_config")
    return deployment["num_replicas"] if scaling is None else scaling["min_replicas"]


def _client(address: str) -> ServeSubmissionClient:
    try:
        return ServeSubmissionClient(address)
    except (ConnectionError, requests.RequestException, ValueError, RuntimeError) as error:
        raise ConfigError(
            f"--address: no Ray dashboard answers at {address!r} ({_first_line(error)}); it is that of the head,"
            " such as http://head:8265",
            param="address",
        ) from error


def _wait(client: ServeSubmissionClient, name: str, since: float, display: StartupDisplay) -> None:
    """Until the cluster calls the application running; what it says from before ``since`` is of an earlier one."""
    while True:
        details = client.get_serve_details().get("applications", {}).get(name)
        if details is not None and details["last_deployed_time_s"] > since:
            display.update(notes_of(details))
            if details["status"] == ApplicationStatus.RUNNING.value:
                return
            if details["status"] in (ApplicationStatus.DEPLOY_FAILED.value, ApplicationStatus.UNHEALTHY.value):
                raise ReplicaUnavailableError(f"the cluster could not start {name}: {why_failed(details)}")
        time.sleep(POLL_S)


def notes_of(application: Details) -> dict[str, StartupNote]:
    """How far each replica of a model is, from what Serve tells of the application."""
    return {
        replica["replica_id"]: StartupNote(stage="ready" if replica["state"] == REACHED else replica["state"].lower())
        for name, deployment in application["deployments"].items()
        if name.startswith(REPLICA_DEPLOYMENT)
        for replica in deployment["replicas"]
    }


def why_failed(application: Details) -> str:
    """The line that says what went wrong, of the application or of its deployments."""
    return last_line([application["message"], *(one["message"] for one in application["deployments"].values())])


def _deployed(details: Details) -> list[Any]:
    """What was asked for before by the REST API."""
    configs = (one.get("deployed_app_config") for one in details.get("applications", {}).values())
    return [config for config in configs if config]


def _deployed_at(details: Details, name: str) -> float:
    return details.get("applications", {}).get(name, {}).get("last_deployed_time_s", 0.0)


def _first_line(error: Exception) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
