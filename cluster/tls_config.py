"""Certificates of the HTTP endpoint."""

from .config_section import FilePath, Section


class TlsConfig(Section):
    """TLS: PEM files, read again when they change."""

    ssl_certfile: FilePath | None = None
    """Certificate of the HTTP endpoint, with those between it and the root. Default: plain HTTP."""
    ssl_keyfile: FilePath | None = None
    """Its private key, without a passphrase. Default: it stands in ssl_certfile."""
    ssl_ca_certs: FilePath | None = None
    """Clients must show a certificate that one of these has signed. Default: they need none."""

    def problem(self) -> tuple[str, str] | None:
        """See Section."""
        if self.ssl_certfile is None and (self.ssl_keyfile or self.ssl_ca_certs):
            return "ssl_certfile", "is needed with ssl_keyfile and ssl_ca_certs"
        return None
