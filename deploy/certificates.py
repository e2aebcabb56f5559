"""Looks at certificates before anything is started with them."""

import ssl

from ..cluster.errors import ConfigError
from ..cluster.tls_config import TlsConfig


def check_certificates(tls: TlsConfig, *, ray_address: str | None = None) -> None:
    """Raises ConfigError when a file cannot be read, is no certificate, or a key is not that of its certificate."""
    if ray_address is not None and tls.ssl_certfile is not None:
        raise ConfigError(
            "ssl_certfile: the HAProxy of a running Ray cluster has its environment from the nodes: start them with"
            " WARMROOT_SSL_CERTFILE and WARMROOT_SSL_KEYFILE, or let what is in front of it speak TLS",
            param="ssl_certfile",
        )
    for kind in ("ssl", "channel"):
        certificate, key = getattr(tls, f"{kind}_certfile"), getattr(tls, f"{kind}_keyfile")
        if certificate is not None:
            _load(f"{kind}_keyfile" if key else f"{kind}_certfile", certificate, key)
        authorities = getattr(tls, f"{kind}_ca_certs")
        if authorities is not None:
            try:
                ssl.create_default_context(cafile=authorities)
            except (OSError, ssl.SSLError) as error:
                raise _wrong(f"{kind}_ca_certs", authorities, error) from error


def _load(key: str, certificate: str, private_key: str | None) -> None:
    def no_passphrase() -> str:
        raise ConfigError(f"{key}: the private key has a passphrase; give one without", param=key)

    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, private_key, no_passphrase)
    except (OSError, ssl.SSLError) as error:
        raise _wrong(key, private_key or certificate, error) from error


def _wrong(key: str, file: str, error: OSError) -> ConfigError:
    reason = error.reason if isinstance(error, ssl.SSLError) else error.strerror
    return ConfigError(f"{key}: {file}: {reason or error}", param=key)
