"""Connections to Redis: one server, the primary that Sentinels name, or a Redis Cluster; and errors without secrets.

Written against redis-py 5 to 8 and Redis 7 and newer.
"""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from typing import Any, cast

from redis import exceptions
from redis.asyncio import Redis, RedisCluster
from redis.asyncio.cluster import ClusterNode
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import Sentinel
from redis.backoff import NoBackoff

from ..cluster.errors import ConfigError
from ..cluster.metadata_store import PASSWORD_VARIABLE, RedisAddress

TIMEOUT_S = 3.0
"""For a connection and for every answer: a Redis that hangs is a Redis that is down."""
MIN_VERSION = 7

Client = Any
"""``Redis`` or ``RedisCluster``, which share their commands but no base class."""


class RedisAwayError(ConnectionError):
    """Redis does not do what was asked of it now; it may do so later."""


async def connect(address: RedisAddress) -> Client:
    """A client of the Redis there, asked once what it is. Raises ConfigError where trying again cannot help.

    Other failures are ConnectionErrors.
    """
    async with reporting(address, at_start=True):
        *others, last = address.hosts[:1] if address.service else address.hosts
        for host in others:  # another node of the cluster may be up
            with suppress(exceptions.ConnectionError, exceptions.TimeoutError, OSError):
                return await _connect(address, host)
        return await _connect(address, last)


async def _connect(address: RedisAddress, host: tuple[str, int]) -> Client:
    client: Any = _single(address, host)
    try:
        info = await client.info()
        _check_version(address, info)
        if not info.get("cluster_enabled"):
            return client
    except BaseException:
        await client.aclose()
        raise
    await client.aclose()
    return await _cluster(address)


def node_of(client: Client, address: RedisAddress, key: str) -> Client:
    """A plain client for what a cluster's client cannot do: to listen. Of the node that has ``key``."""
    if not isinstance(client, RedisCluster):
        return client
    node: Any = client.get_node_from_key(key)
    return Redis(host=node.host, port=node.port, **_options(address))


@asynccontextmanager
async def reporting(address: RedisAddress, *, at_start: bool = False) -> AsyncGenerator[None, None]:
    """Turns whatever Redis says into a ConnectionError; ``at_start``, what configuration must mend into a ConfigError.

    Messages name the server and the fault, and no secret.
    """
    try:
        yield
    except RedisAwayError:
        raise
    except exceptions.RedisError as error:
        mistake = _mistake(address, error) if at_start else None
        if mistake is not None:
            raise ConfigError(f"metadata_store: {mistake}", param="metadata_store") from None
        raise RedisAwayError(f"Redis at {address}: {_said(error)}") from None
    except OSError as error:  # redis-py lets some of the socket's own errors through
        raise RedisAwayError(f"Redis at {address}: {error}") from None


def _mistake(address: RedisAddress, error: exceptions.RedisError) -> str | None:
    """What an operator has done wrong, if it is that."""
    said = str(error)
    if isinstance(error, exceptions.AuthenticationError) or said.startswith(("NOAUTH", "WRONGPASS")):
        who = f"user {address.username}" if address.username else "the default user"
        given = "the password is wrong" if address.password else f"it wants one (in the URL, or in {PASSWORD_VARIABLE})"
        return f"Redis at {address} refuses the password of {who}: {given}"
    if "DB index is out of range" in said or "SELECT is not allowed" in said:
        return f"Redis at {address} has no database {address.db}"
    if isinstance(error, (exceptions.NoPermissionError, exceptions.OutOfMemoryError)) or said.startswith("READONLY"):
        return f"Redis at {address}: {_said(error)}"
    return None


def _said(error: exceptions.RedisError) -> str:
    if isinstance(error, exceptions.OutOfMemoryError):
        return "its memory is full (maxmemory)"
    if isinstance(error, exceptions.AuthenticationError):
        return "it refuses the password"  # what the server says may quote what it was given
    return " ".join(str(error).split())[:200] or type(error).__name__


def _check_version(address: RedisAddress, info: dict[str, Any]) -> None:
    version = str(info.get("redis_version", "0"))
    major = version.partition(".")[0]
    if not major.isdigit() or int(major) < MIN_VERSION:
        raise ConfigError(
            f"metadata_store: Redis at {address} is of version {version}; {MIN_VERSION} or newer is needed",
            param="metadata_store",
        )


def _single(address: RedisAddress, host: tuple[str, int]) -> Redis:
    options = _options(address)
    if not address.service:
        return Redis(host=host[0], port=host[1], db=address.db, **options)
    # Sentinels seldom have the password of the Redis that they watch, but the same authority and timeouts.
    asking = {key: value for key, value in options.items() if key not in ("username", "password")}
    sentinel = cast(Any, Sentinel)(list(address.hosts), sentinel_kwargs=asking, db=address.db, **options)
    return sentinel.master_for(address.service)


async def _cluster(address: RedisAddress) -> RedisCluster:
    nodes = [ClusterNode(host, port) for host, port in address.hosts]
    client = RedisCluster(startup_nodes=nodes, **_options(address))
    await client.initialize()
    return client


def _options(address: RedisAddress) -> dict[str, Any]:
    options: dict[str, Any] = {
        "username": address.username,
        "password": address.password,
        "socket_timeout": TIMEOUT_S,
        "socket_connect_timeout": TIMEOUT_S,
        "protocol": 2,
        # Callers try again by themselves, and know better what must not happen twice.
        "retry": Retry(NoBackoff(), 0),
    }
    if address.tls:
        options |= {"ssl": True, "ssl_ca_certs": address.ca_file}
    return options
