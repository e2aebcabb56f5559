"""Certificates for tests: an authority, and what it has signed."""

import subprocess
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Authority:
    """Signs certificates for 127.0.0.1; all files are in ``folder``."""

    folder: Path

    @property
    def file(self) -> Path:
        return self.folder / "authority.pem"

    @classmethod
    def make(cls, folder: Path) -> "Authority":
        authority = cls(folder)
        _openssl(
            *("req", "-x509", "-nodes", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-days", "1"),
            *("-subj", "/CN=test authority", "-keyout", str(folder / "authority.key"), "-out", str(authority.file)),
        )
        return authority

    def sign(self, name: str) -> tuple[Path, Path]:
        """(certificate, key), which replace those of that name."""
        certificate, key, request = (self.folder / f"{name}.{kind}" for kind in ("pem", "key", "csr"))
        _openssl(
            *("req", "-nodes", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-subj", f"/CN={name}"),
            *("-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(request)),
        )
        _openssl(
            *("x509", "-req", "-in", str(request), "-CA", str(self.file), "-CAkey", str(self.folder / "authority.key")),
            *("-CAcreateserial", "-copy_extensions", "copy", "-days", "1", "-out", str(certificate)),
        )
        return certificate, key


def _openssl(*arguments: str) -> None:
    subprocess.run(["openssl", *arguments], check=True, capture_output=True)
