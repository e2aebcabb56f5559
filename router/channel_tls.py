"""TLS of the channels: each end shows a certificate, and believes one that an authority of the cluster has signed.

Names in certificates are not looked at: replicas come and go at addresses that nobody knows beforehand, and whoever
has a certificate of the cluster belongs to it. The cluster's token is asked for all the same.
"""

import os
import ssl
from collections.abc import Mapping


class ChannelTls:
    """Contexts from PEM files, which are read again when they have changed."""

    def __init__(self, certfile: str, keyfile: str, ca_certs: str) -> None:
        """Raises OSError (ssl.SSLError is one) for files that cannot be read or do not belong together."""
        self._files = certfile, keyfile, ca_certs
        self._seen = self._stamps()
        self._server = self._context(ssl.PROTOCOL_TLS_SERVER)

    @classmethod
    def of(cls, files: Mapping[str, str]) -> "ChannelTls | None":
        """From a model's card, or ``TlsConfig.channel``; None: plain TCP."""
        return cls(files["certfile"], files["keyfile"], files["ca_certs"]) if files else None

    def server(self) -> ssl.SSLContext:
        """For who listens: the same object always, so that ``renew`` reaches those who hold it."""
        return self._server

    def client(self) -> ssl.SSLContext:
        """For one connection."""
        return self._context(ssl.PROTOCOL_TLS_CLIENT)

    def renew(self) -> None:
        """Take changed files up for connections to come; those that do not fit together yet change nothing."""
        try:
            stamps = self._stamps()
            if stamps != self._seen:
                self._load(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER))
                self._load(self._server)
                self._seen = stamps
        except OSError:
            return

    def _context(self, protocol: int) -> ssl.SSLContext:
        context = ssl.SSLContext(protocol)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.check_hostname = False
        context.verify_mode = ssl.CERT_REQUIRED
        self._load(context)
        return context

    def _load(self, context: ssl.SSLContext) -> None:
        certfile, keyfile, ca_certs = self._files
        context.load_cert_chain(certfile, keyfile)
        context.load_verify_locations(ca_certs)

    def _stamps(self) -> list[tuple[int, int]]:
        return [(found.st_ino, found.st_mtime_ns) for found in map(os.stat, self._files)]
