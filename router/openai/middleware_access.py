"""Who gets in: API keys, the admin's part, and what is open to all."""

from ipaddress import ip_address
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Receive, Scope, Send

from ...cluster.errors import AuthenticationError, ClientError, PermissionDeniedError
from ..tenancy.key_store import KeyStore
from ..tenancy.principal import Principal
from .errors import error_response
from .scopes import header, path_of

METRICS_PATH = "/metrics"
OPEN_PATHS = frozenset(
    {
        "/health",
        "/livez",
        "/readyz",
        "/ping",
        METRICS_PATH,
        "/version",
        "/docs",
        "/docs/oauth2-redirect",
        "/openapi.json",
    }
)
"""Served without an API key: probes, scrapes and the documentation."""
ADMIN_PATHS = ("/admin", "/console")
"""With all that is below them: for admins only."""


class Access:
    """401 without a good key where one is needed, 403 for a key that is not for this; else the principal in the scope.

    ``open_admin``: where there are no keys at all, everybody is an admin but pages of other sites. ``open_metrics``:
    scrapes need no key. ``console``: paths of files without which a browser could not ask for a key.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        keys: KeyStore,
        open_admin: bool,
        open_metrics: bool,
        console: frozenset[str] = frozenset(),
    ) -> None:
        self.app = app
        self._console = console
        self._keys = keys
        self._open_admin = open_admin
        self._open_paths = OPEN_PATHS if open_metrics else OPEN_PATHS - {METRICS_PATH}
        self._anybody = Principal()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """An ASGI application."""
        if scope["type"] == "http":
            try:
                scope.setdefault("state", {})["principal"] = await self._principal(scope)
            except ClientError as error:
                response = error_response(error)
                if isinstance(error, AuthenticationError):
                    response.headers["www-authenticate"] = "Bearer"
                return await response(scope, receive, send)
        await self.app(scope, receive, send)

    async def _principal(self, scope: Scope) -> Principal:
        path = path_of(scope)
        if scope["method"] == "OPTIONS" or path in self._open_paths:
            return self._anybody
        if path in self._console and (self._keys.has_keys or self._open_admin):
            scope["state"]["admin_key"] = "needed" if self._keys.has_keys else "none"
            return self._anybody
        found = await self._holder(scope) if self._keys.has_keys else None
        for_admins = is_for_admins(path)
        if found is None:
            if self._keys.has_keys and (for_admins or not self._keys.is_open):
                raise AuthenticationError("a valid API key is needed: Authorization: Bearer KEY")
            if for_admins and not self._open_admin:
                raise PermissionDeniedError(f"{path} is closed: start the server with --admin-api-key and use that key")
            if for_admins:
                _check_origin(scope)
        elif for_admins and not found.is_admin:
            raise PermissionDeniedError(f"{path} needs an admin's key")
        return found or self._anybody

    async def _holder(self, scope: Scope) -> Principal | None:
        scheme, _, key = (header(scope, b"authorization") or "").partition(" ")
        key = key.strip()
        # Whatever the scheme, a key is looked for: the time that takes is the same.
        found = await self._keys.find(key)
        return found if key and scheme.lower() == "bearer" else None


def _check_origin(scope: Scope) -> None:
    """A browser on this machine must neither do here what somebody else's page asks for, nor tell it what is here.

    A name with a dot in it may be anybody's, however it resolves (DNS rebinding).
    """
    host, origin = header(scope, b"host") or "", header(scope, b"origin")
    name = urlsplit(f"//{host}").hostname or ""
    if "." in name and not name.endswith(".localhost") and not _is_address(name):
        raise PermissionDeniedError(f"without keys the admin's part is open to this machine only, not as {name[:100]}")
    if origin is not None and urlsplit(origin).netloc != host:
        raise PermissionDeniedError("without keys the admin's part is closed to pages of other sites")


def _is_address(name: str) -> bool:
    try:
        ip_address(name)
    except ValueError:
        return False
    return True


def is_for_admins(path: str) -> bool:
    """Whether ``path``, without the root path, is an admin's."""
    return any(path == admin or path.startswith(f"{admin}/") for admin in ADMIN_PATHS)
