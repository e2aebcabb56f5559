"""Gives a running HAProxy its certificates anew when their files have changed: open connections go on.

    python -I renewal.py CONFIGURATION PID

ends with process PID, its parent. Only the standard library: ``haproxy.sh`` starts it beside every HAProxy.
"""

import os
import re
import socket
import sys
import time
from contextlib import suppress
from pathlib import Path

_LOOK_S = 2.0
_ANSWER_S = 5.0

Stamp = tuple[tuple[int, int, int], ...]


def stamp(files: list[Path]) -> Stamp:
    """What changes with the files, wherever links lead. Raises OSError while one is missing."""
    found = [file.stat() for file in files]
    return tuple((stat.st_mtime_ns, stat.st_ino, stat.st_size) for stat in found)


def renew(admin: str, kind: str, name: Path, files: list[Path]) -> bool:
    """Replace ``name`` by the text of ``files`` through the socket ``admin``; whether HAProxy took it."""
    # A blank line would end the text.
    lines = [line for file in files for line in file.read_text().splitlines() if line.strip()]
    text = "\n".join(lines)
    _ask(admin, f"set ssl {kind} {name} <<\n{text}\n\n")
    return "Success" in _ask(admin, f"commit ssl {kind} {name}\n")


def _ask(admin: str, command: str) -> str:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(_ANSWER_S)
        connection.connect(admin)
        connection.sendall(command.encode())
        answer = b""
        while part := connection.recv(65536):
            answer += part
        return answer.decode(errors="replace")


def main() -> None:
    """See the module."""
    configuration, parent = Path(sys.argv[1]), int(sys.argv[2])
    folder = configuration.parent
    admin = re.findall(r"stats socket (\S+)", configuration.read_text())[0]
    certificate = folder / "endpoint.pem"
    kinds = {
        "cert": (certificate, [file for file in (certificate, folder / "endpoint.pem.key") if file.exists()]),
        "ca-file": (folder / "clients.pem", [file for file in (folder / "clients.pem",) if file.exists()]),
    }
    seen = {kind: stamp(files) for kind, (_, files) in kinds.items()}
    while os.getppid() == parent:
        time.sleep(_LOOK_S)
        for kind, (name, files) in kinds.items():
            with suppress(OSError):  # halfway through being replaced, or HAProxy is ending
                now = stamp(files)
                if now != seen[kind] and renew(admin, kind, name, files):
                    seen[kind] = now


if __name__ == "__main__":
    main()
