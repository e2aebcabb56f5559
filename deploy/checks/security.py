"""What Kubernetes calls the restricted profile of pods, and secrets: they are references, never values."""

import re
from collections.abc import Iterator, Sequence

from .pods import all_pods, containers
from .tools import Manifest, name_of

_SECRET = re.compile(r"(TOKEN|PASSWORD|SECRET|API_KEY|ACCESS_KEY)$")
_CREDENTIALS = re.compile(r"\w+://[^/\s:@]*:[^/\s@]+@")
_HOSTS = ("hostNetwork", "hostPID", "hostIPC")


def problems(manifests: Sequence[Manifest]) -> list[str]:
    """Of every pod of a release, and of what it would store in plain sight."""
    found = [f"{name}: {problem}" for name, pod in all_pods(manifests).items() for problem in _pod(pod)]
    for manifest in manifests:
        if manifest.get("kind") == "Secret":
            found.append(f"{name_of(manifest)}: helm keeps it with the release; name a Secret that exists")
        if _CREDENTIALS.search(str(manifest)):
            found.append(f"{name_of(manifest)}: a password stands in a URL")
    return found


def _pod(pod: Manifest) -> Iterator[str]:
    spec = pod["spec"]
    context = spec.get("securityContext", {})
    if context.get("runAsNonRoot") is not True or not context.get("runAsUser"):
        yield "must run as a user of a number other than 0: runAsNonRoot and runAsUser"
    if context.get("seccompProfile", {}).get("type") != "RuntimeDefault":
        yield "seccompProfile must be RuntimeDefault"
    yield from (f"{key} must not be set" for key in _HOSTS if spec.get(key))
    head = spec["containers"][0]["name"] == "ray-head"
    if spec.get("automountServiceAccountToken") is not False and not head:
        yield "has no use for the API server's token: automountServiceAccountToken must be false"
    for container in containers(pod):
        yield from (f"{container['name']}: {problem}" for problem in _container(container))


def _container(container: Manifest) -> Iterator[str]:
    context = container.get("securityContext", {})
    if context.get("allowPrivilegeEscalation") is not False or context.get("privileged"):
        yield "allowPrivilegeEscalation must be false"
    if context.get("capabilities", {}).get("drop") != ["ALL"] or context["capabilities"].get("add"):
        yield "capabilities must be dropped, ALL of them"
    if context.get("readOnlyRootFilesystem") is not True:
        yield "readOnlyRootFilesystem must be true: what is written belongs into volumes"
    for variable in container.get("env", []):
        if _SECRET.search(variable["name"]) and variable.get("value"):
            yield f"{variable['name']} is a secret: take it from one by secretKeyRef"
