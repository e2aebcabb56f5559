"""Files of JSON lines, such as the audit log, written by a thread so that no disk ever holds a request up.

Files are appended to, and opened anew when they were moved away or removed, as log rotation does. What cannot be
written is counted and left out; serving goes on.
"""

import json
import logging
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)

STDERR = "stderr"
MOST_WAITING = 10_000
"""Lines that wait for a disk that hangs; further ones are lost."""
COMPLAIN_EVERY_S = 60.0
_MODE = 0o640


class JsonLines:
    """``target`` is a file's path or ``stderr``. ``what`` it is, for complaints. ``clock`` gives monotonic seconds."""

    def __init__(self, target: str, what: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._target = target
        self._what = what
        self._clock = clock
        self._lines: queue.Queue[bytes | None] = queue.Queue(MOST_WAITING)
        self._file: _File | None = None if target == STDERR else _File(Path(target))
        self._quiet_until = float("-inf")
        self.lost = 0
        """Lines that could not be written, since start."""
        self._writer = threading.Thread(target=self._write_all, name=f"warmroot {what}", daemon=True)
        self._writer.start()

    def add(self, entry: Mapping[str, Any]) -> None:
        """Write one entry soon. Never raises and never waits."""
        line = json.dumps(entry, separators=(",", ":"), ensure_ascii=True).encode() + b"\n"
        try:
            self._lines.put_nowait(line)
        except queue.Full:
            self._lose(f"{MOST_WAITING} lines wait already")

    def close(self) -> None:
        """Write what waits, and end."""
        with suppress(queue.Full):
            self._lines.put(None, timeout=1.0)
        self._writer.join(timeout=5.0)
        if self._file is not None:
            self._file.close()

    def _write_all(self) -> None:
        while (line := self._lines.get()) is not None:
            self._write(line)

    def _write(self, line: bytes) -> None:
        try:
            if self._file is None:
                sys.stderr.write(line.decode())
                sys.stderr.flush()
            else:
                self._file.append(line)
        except (OSError, ValueError) as error:  # a ValueError is a stream that was closed
            self._lose(str(error))

    def _lose(self, reason: str) -> None:
        self.lost += 1
        if self._clock() >= self._quiet_until:
            self._quiet_until = self._clock() + COMPLAIN_EVERY_S
            message = "%s %s: %s; %d lines are lost so far, and serving goes on"
            log.error(message, self._what, self._target, reason, self.lost)


class _File:
    """A file that others may move away."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor = -1
        self._identity: tuple[int, int] | None = None
        self._torn = False
        """The last line was cut off by a full disk."""

    def append(self, line: bytes) -> None:
        """Raises OSError when not all of it could be written."""
        if self._identity is None or self._identity != _identity_of(self._path):
            self._open()
        data = b"\n" + line if self._torn else line
        written = os.write(self._descriptor, data)
        self._torn = written < len(data) and (written > 0 or self._torn)
        if written < len(data):
            raise OSError("the disk is full")

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor, self._identity = -1, None

    def _open(self) -> None:
        self.close()
        self._descriptor = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, _MODE)
        found = os.fstat(self._descriptor)
        self._identity, self._torn = (found.st_dev, found.st_ino), False


def _identity_of(path: Path) -> tuple[int, int] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino
