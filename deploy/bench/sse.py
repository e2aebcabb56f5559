"""An incremental reader of one HTTP response that streams server-sent events. Lean: it shares cores with the server."""

from collections.abc import Mapping
from math import inf

DONE = b"[DONE]"
_MOST_DIGITS = 16


class SseReader:
    """Feed it bytes as they come. It understands chunked bodies and bodies with a length."""

    def __init__(self) -> None:
        self.status = 0
        self.headers: Mapping[str, str] = {}
        self.complete = False
        """The whole response has been read: the connection may carry the next request."""
        self.body = b""
        """Of a response that is no stream, such as an error."""
        self._raw = b""
        self._text = b""
        self._chunked = False
        self._missing = 0.0
        """Bytes of the body that are still to come."""

    def feed(self, data: bytes) -> list[bytes]:
        """The payloads of the events that ``data`` completes, ``[DONE]`` left out.

        Raises ValueError for what is no HTTP response.
        """
        self._raw += data
        if not self.status and not self._read_head():
            return []
        if self._chunked:
            self._read_chunks()
        else:
            taken = self._raw if len(self._raw) <= self._missing else self._raw[: int(self._missing)]
            self._text += taken
            self._missing -= len(taken)
            self._raw = self._raw[len(taken) :]
            self.complete = not self._missing
        return self._events()

    def _read_head(self) -> bool:
        head, end, rest = self._raw.partition(b"\r\n\r\n")
        if not end:
            return False
        status, *lines = head.decode("latin-1").split("\r\n")
        version, _, code = status.partition(" ")
        self.status = _number(code[:3], 10)
        if not version.startswith("HTTP/") or self.status < 100:
            raise ValueError(f"no HTTP response: {status!r:.40}")
        self.headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        self._chunked = self.headers.get("transfer-encoding", "").lower() == "chunked"
        length = self.headers.get("content-length")
        self._missing = inf if length is None else _number(length, 10)  # without one, until the server closes
        self._raw = rest
        return True

    def _read_chunks(self) -> None:
        raw, at = self._raw, 0
        while not self.complete:
            line_end = raw.find(b"\r\n", at)
            if line_end < 0:
                break
            size = _number(raw[at:line_end].partition(b";")[0].decode("latin-1").strip(), 16)
            end = line_end + 2 + size
            if len(raw) < end + 2:
                break
            self._text += raw[line_end + 2 : end]
            at = end + 2
            if size == 0:
                self.complete = True
                break
        self._raw = raw[at:]

    def _events(self) -> list[bytes]:
        if not self.headers.get("content-type", "").startswith("text/event-stream"):
            self.body = self._text
            return []
        *events, self._text = self._text.split(b"\n\n")
        payloads = [event[6:] for event in events if event.startswith(b"data: ")]
        return [payload for payload in payloads if payload != DONE]


def _number(text: str, base: int) -> int:
    """Digits and nothing else: ``int`` takes signs, and a negative length would be read for ever."""
    if not text.isascii() or not text.isalnum() or len(text) > _MOST_DIGITS:
        raise ValueError(f"not a number: {text!r:.40}")
    return int(text, base)
