"""The console's files. They hold no secrets and no data: a browser gets them without a key and asks for one itself.

The state that the page shows comes from ``/admin/state``, which is for admins only.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

from fastapi import APIRouter, Request
from starlette.responses import RedirectResponse, Response

CONSOLE_PATH = "/console"
KEY_HEADER = "x-warmroot-admin-key"
"""``needed`` or ``none``: so the page asks for a key before it is refused."""
_FOLDER = Path(__file__).parents[2] / "deploy" / "console"
"""Named, not imported: what is in deploy/ is above the router."""
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
}
_HEADERS = {
    # Everything is a file of this folder; text of prompts cannot become a script, whatever is in it.
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self';"
    " connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-cache",
}


@dataclass(frozen=True, slots=True)
class ConsoleFile:
    """A file as it is sent."""

    content: bytes
    media_type: str
    etag: str


def console_files() -> dict[str, ConsoleFile]:
    """By path below ``/console``: a fixed list, read once, so that no path leads anywhere else."""
    found = dict(_read(_FOLDER))
    return {**found, "": found["index.html"]}


def console_paths(served: Mapping[str, ConsoleFile]) -> frozenset[str]:
    """All that is open to a browser that has no key yet."""
    return frozenset({CONSOLE_PATH, *(f"{CONSOLE_PATH}/{name}" for name in served)})


def console_routes(served: Mapping[str, ConsoleFile]) -> APIRouter:
    """``/console``."""
    router = APIRouter(prefix=CONSOLE_PATH, include_in_schema=False)
    for name, file in served.items():
        _add_file(router, f"/{name}", file)

    @router.get("")
    async def folder() -> Response:
        """Relative, so that it holds behind any proxy."""
        return RedirectResponse(f"{CONSOLE_PATH[1:]}/", headers=_HEADERS)

    return router


def _read(folder: Path) -> Iterator[tuple[str, ConsoleFile]]:
    for entry in sorted(folder.iterdir()):
        media_type = _TYPES.get(entry.suffix)
        if media_type is not None:
            content = entry.read_bytes()
            yield entry.name, ConsoleFile(content, media_type, f'"{blake2b(content, digest_size=8).hexdigest()}"')


def _add_file(router: APIRouter, path: str, file: ConsoleFile) -> None:
    async def send(request: Request) -> Response:
        headers = {**_HEADERS, "etag": file.etag, KEY_HEADER: request.state.admin_key}
        if request.headers.get("if-none-match") == file.etag:
            return Response(status_code=304, headers=headers)
        return Response(file.content, media_type=file.media_type, headers=headers)

    router.add_api_route(path, send, methods=["GET", "HEAD"])
