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
    if tls.ssl_certfile is not None:
        _load("ssl_keyfile" if tls.ssl_keyfile else "ssl_certfile", tls.ssl_certfile, tls.ssl_keyfile)
    if tls.ssl_ca_certs is not None:
        _check_authorities("ssl_ca_certs", tls.ssl_ca_certs)
    if ray_address is None:  # the files of a cluster are its hosts'
        _check_channel(tls)


def _check_channel(tls: TlsConfig) -> None:
    if tls.channel_certfile is None or tls.channel_ca_certs is None:
        return
    _load("channel_keyfile" if tls.channel_keyfile else "channel_certfile", tls.channel_certfile, tls.channel_keyfile)
    _check_authorities("channel_ca_certs", tls.channel_ca_certs)


def _check_authorities(key: str, file: str) -> None:
    try:
        ssl.create_default_context(cafile=file)
    except OSError as error:
        raise _wrong(key, file, error) from error


def _load(key: str, certificate: str, private_key: str | None) -> None:
    def no_passphrase() -> str:
        raise ConfigError(f"{key}: the private key has a passphrase; give one without", param=key)

    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, private_key, no_passphrase)
    except OSError as error:
        raise _wrong(key, private_key or certificate, error) from error


def _wrong(key: str, file: str, error: OSError) -> ConfigError:
    reason = error.reason if isinstance(error, ssl.SSLError) else error.strerror
    return ConfigError(f"{key}: {file}: {reason or error}", param=key)
