"""Certificates of the HTTP endpoint, and of the channels between ingresses and replicas."""

from .config_section import FilePath, Section


class TlsConfig(Section):
    """TLS: PEM files, read again when they change."""

    ssl_certfile: FilePath | None = None
    """Certificate of the HTTP endpoint, with those between it and the root. Default: plain HTTP."""
    ssl_keyfile: FilePath | None = None
    """Its private key, without a passphrase. Default: it stands in ssl_certfile."""
    ssl_ca_certs: FilePath | None = None
    """Clients must show a certificate that one of these has signed. Default: they need none."""

    channel_certfile: FilePath | None = None
    """Certificate that ingresses and replicas show each other, on every host. Default: their channels are plain TCP."""
    channel_keyfile: FilePath | None = None
    """Its private key, without a passphrase. Default: it stands in channel_certfile."""
    channel_ca_certs: FilePath | None = None
    """Who signs these certificates: nobody else's are believed. Needed with channel_certfile."""

    @property
    def channel(self) -> dict[str, str]:
        """Files of the channels; empty: plain TCP."""
        if self.channel_certfile is None or self.channel_ca_certs is None:
            return {}
        keyfile = self.channel_keyfile or self.channel_certfile
        return {"certfile": self.channel_certfile, "keyfile": keyfile, "ca_certs": self.channel_ca_certs}

    def problem(self) -> tuple[str, str] | None:
        """See Section."""
        if self.ssl_certfile is None and (self.ssl_keyfile or self.ssl_ca_certs):
            return "ssl_certfile", "is needed with ssl_keyfile and ssl_ca_certs"
        if self.channel_certfile is None and (self.channel_keyfile or self.channel_ca_certs):
            return "channel_certfile", "is needed with channel_keyfile and channel_ca_certs"
        if self.channel_certfile is not None and self.channel_ca_certs is None:
            return "channel_ca_certs", "is needed with channel_certfile: without it anybody's certificate would do"
        return None
