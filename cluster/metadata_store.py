"""Where the cluster keeps what its routers share: in itself, or in Redis, named by a URL.

    redis://[user:password@]host:6379[,host2...][/db]        one server, or nodes of a Redis Cluster
    rediss://...                                             the same over TLS
    redis+sentinel://[user:password@]host:26379,.../service  the primary that Sentinels name

Options after ``?``: ``prefix`` (of all keys; one for each cluster that shares the Redis), ``ca`` (file of the authority
that signed the server's certificate), ``db`` (with Sentinel), ``tls=1`` (Sentinel and Redis over TLS).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from urllib.parse import SplitResult, parse_qsl, quote, unquote, urlsplit

EMBEDDED = "embedded"
PASSWORD_VARIABLE = "WARMROOT_REDIS_PASSWORD"
_REDIS_PORT, _SENTINEL_PORT = 6379, 26379
_SENTINEL_SCHEME = "redis+sentinel"
_OPTIONS = ("prefix", "ca", "db", "tls")


@dataclass(frozen=True, slots=True, kw_only=True)
class RedisAddress:
    """How to reach a Redis. Neither ``repr`` nor ``str`` shows the password."""

    hosts: tuple[tuple[str, int], ...]
    db: int = 0
    username: str | None = None
    password: str | None = field(default=None, repr=False)
    service: str = ""
    """Name of the primary that the Sentinels at ``hosts`` watch; empty: ``hosts`` are Redis itself."""
    tls: bool = False
    ca_file: str | None = None
    prefix: str = "warmroot"

    def __str__(self) -> str:
        scheme = _SENTINEL_SCHEME if self.service else "rediss" if self.tls else "redis"
        hosts = ",".join(f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host, port in self.hosts)
        return f"{scheme}://{hosts}/{self.service or self.db}"

    @property
    def url(self) -> str:
        """All of it, password included: what ``parse_store`` reads."""
        user = "" if self.username is None else quote(self.username, safe="")
        secret = "" if self.password is None else ":" + quote(self.password, safe="")
        scheme, _, rest = str(self).partition("://")
        options = {"prefix": self.prefix, "ca": self.ca_file}
        options |= {"db": self.db, "tls": int(self.tls)} if self.service else {}
        query = "&".join(f"{name}={quote(str(value), safe='')}" for name, value in options.items() if value)
        return f"{scheme}://{f'{user}{secret}@' if user or secret else ''}{rest}?{query}"


def parse_store(store: str) -> RedisAddress | None:
    """A Redis, or None for ``embedded``. Raises ValueError; its message shows nothing that may be secret."""
    if store == EMBEDDED:
        return None
    try:
        parts = urlsplit(store)
        # The name of a file or host keeps its case, so hosts are taken from the text itself.
        credentials, _, hosts = parts.netloc.rpartition("@")
    except ValueError:
        raise ValueError("is not a URL") from None
    if parts.scheme not in ("redis", "rediss", _SENTINEL_SCHEME):
        raise ValueError(f"must be {EMBEDDED}, redis://HOST, rediss://HOST or {_SENTINEL_SCHEME}://HOST/SERVICE")
    options = dict(parse_qsl(parts.query))
    unknown = options.keys() - set(_OPTIONS)
    if unknown:
        raise ValueError(f"unknown option {min(unknown)}; there are {', '.join(_OPTIONS)}")
    sentinel = parts.scheme == _SENTINEL_SCHEME
    service, db = _path(parts, options, sentinel=sentinel)
    user, _, password = credentials.partition(":")
    return RedisAddress(
        hosts=tuple(_host(item, _SENTINEL_PORT if sentinel else _REDIS_PORT) for item in hosts.split(",")),
        db=db,
        username=unquote(user) or None,
        password=unquote(password) or None,
        service=service,
        tls=parts.scheme == "rediss" or options.get("tls") == "1",
        ca_file=options.get("ca"),
        prefix=_prefix(options.get("prefix", "warmroot")),
    )


def with_password(address: RedisAddress, environ: Mapping[str, str]) -> RedisAddress:
    """The address with the environment's password, unless it has one of its own."""
    password = environ.get(PASSWORD_VARIABLE)
    return replace(address, password=password) if password and address.password is None else address


def _path(parts: SplitResult, options: Mapping[str, str], *, sentinel: bool) -> tuple[str, int]:
    """(service, db)."""
    path = unquote(parts.path.strip("/"))
    if sentinel and not path:
        raise ValueError("the name of the primary is missing: redis+sentinel://HOST/SERVICE")
    number = options.get("db", "0") if sentinel else path or options.get("db", "0")
    if not (number.isascii() and number.isdigit()):
        raise ValueError("the database must be a number")
    return path if sentinel else "", int(number)


def _host(text: str, default_port: int) -> tuple[str, int]:
    host, colon, port = text.rpartition(":") if not text.endswith("]") else (text, "", "")
    if not colon:
        host, port = text, str(default_port)
    host = host.strip("[]")
    if not host:
        raise ValueError("a host is missing")
    if not (port.isascii() and port.isdigit() and 0 < int(port) < 65536):
        # Never shown: a password with an @ that is not quoted would stand here.
        raise ValueError("a port must be a number from 1 to 65535")
    return host, int(port)


def _prefix(text: str) -> str:
    if not text or not all(letter.isalnum() or letter in "-_.:" for letter in text):
        raise ValueError("the prefix must be of letters, digits and -_.:")
    return text
