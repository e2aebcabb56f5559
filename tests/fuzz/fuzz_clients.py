"""HTTP requests that no well-behaved client sends, and a way to send them."""

import asyncio
import json
from contextlib import suppress

STREAM = {"model": "tiny", "prompt": "hello", "max_tokens": 60, "ignore_eos": True, "stream": True, "temperature": 0}
BODY = json.dumps(STREAM).encode()
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
REQUEST = HEAD + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY
GET = b"GET /livez HTTP/1.1\r\nHost: x\r\n\r\n"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
BROKEN = [
    b"GET /livez HTTP/1.1\r\nHost: x\r\nX: " + b"a" * 200_000 + b"\r\n\r\n",
    b"GET /livez HTTP/1.1\r\nHost: x\r\n" + b"".join(b"X%d: a\r\n" % n for n in range(20_000)) + b"\r\n",
    b"GET /" + b"a" * 200_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
    CHUNKED + b"zz\r\n" + BODY,
    CHUNKED + b"-5\r\nabcde\r\n0\r\n\r\n",
    CHUNKED + b"ffffffffffffffffff\r\nabc\r\n",
    CHUNKED + b"7fffffff\r\nabc",
    CHUNKED + b"%x\r\n%s" % (len(BODY), BODY) + b"junk instead of a line end",
    CHUNKED + b"0\r\n\r\n",
    HEAD + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\nGET /livez HTTP/1.1\r\n\r\n",
    HEAD + b"Content-Length: -1\r\n\r\n" + BODY,
    HEAD + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\n" + BODY,
    HEAD + b"Content-Length: " + b"9" * 5000 + b"\r\n\r\n" + BODY,
    HEAD + b"Content-Length: 99999999999\r\n\r\n" + BODY,
    HEAD + b"Expect: 100-continue\r\nContent-Length: 3\r\n\r\n{}",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(500),  # a TLS greeting
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    b"\x00" * 5000,
    b"\r\n" * 5000,
    b"GET\x00 /livez HTTP/1.1\r\nHost: x\r\n\r\n",
    b"GET /livez%00%ff/../../etc/passwd?\xff=\xfe HTTP/1.1\r\nHost: x\r\n\r\n",
    b"GET /v1/models/%ff%00 HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer \xff\xfe\r\n\r\n",
    b"OPTIONS * HTTP/1.1\r\nHost: x\r\n\r\n",
    b"CONNECT x:1 HTTP/1.1\r\nHost: x\r\n\r\n",
    b"GET /v1/models HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    b"Sec-WebSocket-Key: x\r\nSec-WebSocket-Version: 13\r\n\r\n",
    HEAD + b"Content-Encoding: gzip\r\nContent-Length: %d\r\n\r\n" % len(BODY) + BODY,
    HEAD.replace(b"json", b"json; charset=utf-16") + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY,
]


async def talk(port: int, *parts: bytes, pause_s: float = 0.0, reads: int = 2**20, half_close: bool = False) -> bytes:
    """What the server says to these bytes, until it closes or says nothing more; then the connection breaks."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    heard = b""
    with suppress(OSError, asyncio.TimeoutError):
        for part in parts:
            writer.write(part)
            await writer.drain()
            await asyncio.sleep(pause_s)
        if half_close:
            writer.write_eof()
        while len(heard) < reads:
            more = await asyncio.wait_for(reader.read(min(4096, reads - len(heard))), 0.5)
            if not more:
                break
            heard += more
    writer.transport.abort()
    return heard
