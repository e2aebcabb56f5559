"""Tells peers that this process lives and how far it is, and notices when a peer does not tell any more.

It has connections and a thread of its own, so that neither a long step nor a full buffer delays it.
"""

import logging
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import cast

from ...cluster.errors import RankLostError

SILENCE_S = 1.8
"""A peer that says nothing for this long is lost: so a cut link or a stopped process shows within 2 s."""
STARVED_FACTOR = 8
"""A process of this machine that merely waits for a processor may be silent so many times longer."""
_BEAT = struct.Struct("<q")
_GOODBYE = -1
_CREDENTIALS = struct.Struct("3i")
_COULD_RUN = "RSD"
"""States of a process that runs or waits."""

logger = logging.getLogger(__name__)


class Pulse:
    """Exchanges beats with ``peers``. Calls ``on_lost`` once, from its thread, when one of them is gone.

    A beat carries ``progress``: the last step that the sender has done with.
    """

    def __init__(
        self,
        peers: Mapping[str, socket.socket],
        on_lost: Callable[[RankLostError], None],
        *,
        silence_s: float = SILENCE_S,
    ) -> None:
        """``peers`` are connected sockets by the names that errors use. They are owned from here on."""
        self.progress = 0
        self._period_s = silence_s / 4
        self._silence_s = silence_s
        self._on_lost = on_lost
        self._stopping = threading.Event()
        self._peers = [_Peer(name, connection) for name, connection in peers.items()]
        self._wake, self._woken = socket.socketpair()
        self._thread = threading.Thread(target=self._run, name="pulse", daemon=True)
        self._thread.start()

    def progress_of_peers(self) -> dict[str, int]:
        """The last step that each peer had done with when it last said so."""
        return {peer.name: peer.progress for peer in self._peers}

    def close(self) -> None:
        """Take leave, so that peers do not take this end for a loss. Idempotent."""
        if not self._stopping.is_set():
            self._stopping.set()
            self._wake.close()
            self._thread.join()

    def _run(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._woken, selectors.EVENT_READ)
            for peer in self._peers:
                selector.register(peer.connection, selectors.EVENT_READ, peer)
            try:
                self._exchange(selector)
            except RankLostError as error:
                if not self._stopping.is_set():
                    self._on_lost(error)
        for peer in self._peers:
            peer.connection.close()
        self._woken.close()

    def _exchange(self, selector: selectors.BaseSelector) -> None:
        next_beat = time.monotonic()
        while not self._stopping.is_set():
            now = time.monotonic()
            if now >= next_beat:
                next_beat = now + self._period_s
                self._beat(self.progress)
            for key, _ in selector.select(max(0.0, next_beat - time.monotonic())):
                peer = cast("_Peer | None", key.data)
                if peer is not None and not peer.hear():
                    selector.unregister(peer.connection)
            # After the beats that had come were heard: this process may have been held up itself.
            self._check(time.monotonic())
        self._beat(_GOODBYE)

    def _beat(self, progress: int) -> None:
        for peer in self._peers:
            if not peer.left:
                peer.tell(progress)

    def _check(self, now: float) -> None:
        for peer in self._peers:
            silence_s = now - peer.heard
            if peer.left or silence_s <= self._silence_s:
                continue
            if silence_s > STARVED_FACTOR * self._silence_s or not peer.could_speak():
                raise RankLostError(f"{peer.name} has said nothing for {silence_s:.1f} s")


class _Peer:
    def __init__(self, name: str, connection: socket.socket) -> None:
        connection.setblocking(False)
        self.name = name
        self.connection = connection
        self.heard = time.monotonic()
        self.progress = 0
        self.left = False
        self._buffer = b""

    def tell(self, progress: int) -> None:
        try:
            self.connection.send(_BEAT.pack(progress))
        except OSError as error:  # its silence will tell, or the end of its beats, or its goodbye
            logger.debug("%s takes no beat: %s", self.name, error)

    def could_speak(self) -> bool:
        """Whether it is a process of this machine that has neither ended nor been stopped."""
        if self.connection.family != socket.AF_UNIX:
            return False
        credentials = self.connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        pid, _, _ = _CREDENTIALS.unpack(credentials)
        try:
            stat = Path(f"/proc/{pid}/stat").read_text()
        except OSError:
            return False
        return stat.rpartition(")")[2].split()[0] in _COULD_RUN

    def hear(self) -> bool:
        """Read what has come; False once the peer has taken leave."""
        try:
            data = self.connection.recv(2**12)
        except BlockingIOError:
            return True
        except OSError as error:
            raise RankLostError(f"{self.name} is gone: {error}") from error
        if not data:
            raise RankLostError(f"{self.name} is gone: it has closed the connection")
        self.heard = time.monotonic()
        data = self._buffer + data
        whole = len(data) - len(data) % _BEAT.size
        self._buffer = data[whole:]
        for (progress,) in _BEAT.iter_unpack(data[:whole]):
            self.left = self.left or progress == _GOODBYE
            self.progress = max(self.progress, progress)
        return not self.left
