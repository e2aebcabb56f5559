"""A running endpoint, as the commands that talk to one see it."""

import argparse
import json
import os
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from typing import Any

import httpx

from ...cluster.errors import (
    AuthenticationError,
    ConfigError,
    EngineError,
    InvalidRequestError,
    ReplicaUnavailableError,
    WarmrootError,
)

DEFAULT_URL = "http://127.0.0.1:8000"


def add_endpoint_flags(parser: argparse.ArgumentParser) -> None:
    """``--url`` and ``--api-key``."""
    parser.add_argument(
        "--url",
        default=os.environ.get("WARMROOT_URL", DEFAULT_URL),
        help=f"endpoint, also from WARMROOT_URL (default: {DEFAULT_URL})",
    )
    parser.add_argument(
        "--api-key", default=os.environ.get("WARMROOT_API_KEY"), help="its API key, also from WARMROOT_API_KEY"
    )


def add_sampling_flags(parser: argparse.ArgumentParser) -> None:
    """Sampling parameters; those not given are left to the server."""
    parser.add_argument("--model", help="name of a served model (default: the first one)")
    parser.add_argument("--max-tokens", type=int, metavar="N", help="most tokens to generate")
    parser.add_argument("--temperature", type=float, metavar="X", help="0 is greedy")
    parser.add_argument("--top-p", type=float, metavar="X", help="sample from the smallest set with this probability")
    parser.add_argument("--seed", type=int, metavar="N", help="the same seed draws the same tokens")
    parser.add_argument("--stop", nargs="+", metavar="TEXT", help="texts that end the output")


def sampling_fields(arguments: argparse.Namespace) -> dict[str, Any]:
    """The body's fields from ``add_sampling_flags``."""
    names = ("max_tokens", "temperature", "top_p", "seed", "stop")
    return {name: getattr(arguments, name) for name in names if getattr(arguments, name) is not None}


_NO_JSON = (ValueError, RecursionError)
"""What texts that are not JSON, or nested without end, make a parser raise."""


class Endpoint:
    """HTTP client of one endpoint. Every failure is a WarmrootError that says what to do."""

    def __init__(self, url: str, api_key: str | None = None) -> None:
        host = _host(url)
        self.url = url.rstrip("/").removesuffix("/v1")
        self._client = httpx.Client(
            base_url=self.url,
            headers={"Authorization": f"Bearer {api_key}"} if api_key else {},
            # A prompt may wait in the queue: reading has no deadline of its own.
            timeout=httpx.Timeout(None, connect=5.0),
            # A proxy is of no use for this machine's own addresses.
            trust_env=host not in ("127.0.0.1", "localhost", "::1"),
        )

    def get(self, path: str) -> Any:
        """The JSON at ``path``."""
        with self._explained():
            response = self._client.get(path)
        _check(response)
        try:
            return response.json()
        except _NO_JSON as error:
            raise self._foreign(path) from error

    def post(self, path: str, body: dict[str, Any]) -> Any:
        """The JSON that ``path`` answers to ``body``."""
        with self._explained():
            response = self._client.post(path, json=body)
        _check(response)
        try:
            return response.json()
        except _NO_JSON as error:
            raise self._foreign(path) from error

    def ready(self) -> bool:
        """Whether a replica is ready."""
        with self._explained():
            return self._client.get("/readyz").status_code == httpx.codes.OK

    def model(self) -> str:
        """Name of the first served model."""
        try:
            names = [str(model["id"]) for model in self.get("/v1/models")["data"]]
        except (KeyError, TypeError) as error:
            raise self._foreign("/v1/models") from error
        if not names:
            raise ReplicaUnavailableError(f"{self.url} serves no model yet")
        return names[0]

    def stream(self, path: str, body: dict[str, Any]) -> Generator[dict[str, Any], None, None]:
        """The chunks of a streamed answer. Closing the iterator aborts the request."""
        body = body | {"stream": True, "stream_options": {"include_usage": True}}
        with self._explained(), self._client.stream("POST", path, json=body) as response:
            if response.is_error:
                response.read()
            _check(response)
            for line in response.iter_lines():
                data = line.removeprefix("data:").strip() if line.startswith("data:") else ""
                if data == "[DONE]":
                    return
                if data:
                    yield self._chunk(path, data)
        raise EngineError(f"{self.url} closed the stream before its end")

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    def _chunk(self, path: str, data: str) -> dict[str, Any]:
        try:
            chunk = json.loads(data)
            if "error" in chunk:
                raise EngineError(str(chunk["error"]["message"]))
            return dict(chunk)
        except (*_NO_JSON, KeyError, TypeError) as error:
            raise self._foreign(path) from error

    def _foreign(self, path: str) -> EngineError:
        return EngineError(f"{self.url}{path} does not answer as a Warmroot endpoint does")

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except httpx.ConnectError as error:
            raise ReplicaUnavailableError(
                f"nothing answers at {self.url}; start an endpoint with `warmroot serve smollm2` or name one with --url"
            ) from error
        except httpx.ConnectTimeout as error:
            raise ReplicaUnavailableError(f"{self.url} does not answer within 5 s") from error
        except httpx.HTTPError as error:
            raise ReplicaUnavailableError(f"lost the connection to {self.url}: {error}") from error


def _host(url: str) -> str:
    try:
        parsed = httpx.URL(url)
    except httpx.InvalidURL:
        parsed = httpx.URL()
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise ConfigError(f"--url: {url!r} is not a URL such as {DEFAULT_URL}", param="url")
    return parsed.host


def _check(response: httpx.Response) -> None:
    """Raise the error that the response's body tells of."""
    if not response.is_error:
        return
    try:
        message = str(response.json()["error"]["message"])
    except (*_NO_JSON, KeyError, TypeError):
        message = f"{response.url} answers {response.status_code} {response.reason_phrase}"
    raise _error_of(response.status_code, message)


def _error_of(status: int, message: str) -> WarmrootError:
    if status == httpx.codes.UNAUTHORIZED:
        return AuthenticationError(f"{message} (give one with --api-key)")
    if status == httpx.codes.SERVICE_UNAVAILABLE:
        return ReplicaUnavailableError(message)
    return InvalidRequestError(message) if httpx.codes.is_client_error(status) else EngineError(message)
