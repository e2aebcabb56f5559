"""An incremental reader of one HTTP response that streams server-sent events. Lean: it shares cores with the server."""

from collections.abc import Mapping

DONE = b"[DONE]"


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
        self._length = 0

    def feed(self, data: bytes) -> list[bytes]:
        """The payloads of the events that ``data`` completes, ``[DONE]`` left out."""
        self._raw += data
        if not self.status and not self._read_head():
            return []
        if self._chunked:
            self._read_chunks()
        else:
            self._text += self._raw
            self._length -= len(self._raw)
            self._raw = b""
            self.complete = self._length <= 0
        return self._events()

    def _read_head(self) -> bool:
        head, end, rest = self._raw.partition(b"\r\n\r\n")
        if not end:
            return False
        status, *lines = head.decode("latin-1").split("\r\n")
        self.status = int(status.split(" ", 2)[1])
        self.headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        self._chunked = self.headers.get("transfer-encoding", "").lower() == "chunked"
        self._length = int(self.headers.get("content-length", 0))
        self._raw = rest
        return True

    def _read_chunks(self) -> None:
        raw, at = self._raw, 0
        while True:
            line_end = raw.find(b"\r\n", at)
            if line_end < 0:
                break
            size = int(raw[at:line_end].partition(b";")[0], 16)
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
