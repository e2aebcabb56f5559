"""Reads ASGI scopes."""

from starlette.types import Scope


def header(scope: Scope, name: bytes) -> str | None:
    """The first header of that name, which is in lower case as ASGI has them."""
    return next((value.decode("latin-1") for key, value in scope["headers"] if key == name), None)


def path_of(scope: Scope) -> str:
    """Without the root path under which a proxy serves the API."""
    path: str = scope["path"]
    root: str = scope.get("root_path", "")
    return path.removeprefix(root) if path.startswith(f"{root}/") else path  # whole segments only, as it is routed
