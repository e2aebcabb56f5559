"""What users and other programs write: configuration, speculative_config, store URLs, traces, streams of events."""

import json
import tempfile
from contextlib import suppress
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import httpx
import yaml
from fuzz_formats import as_json
from fuzz_target import Target

from warmroot.cluster.config_file import load_config
from warmroot.cluster.errors import ConfigError, WarmrootError
from warmroot.cluster.metadata_store import parse_store
from warmroot.cluster.speculative_config import read_speculative_config
from warmroot.deploy.bench.sse import SseReader
from warmroot.deploy.cli.endpoint import Endpoint
from warmroot.deploy.simulate.trace import read_trace, spread, superpose


def read_yaml(data: bytes) -> None:
    with tempfile.TemporaryDirectory(prefix="warmroot-fuzz-") as folder:
        path = Path(folder) / "config.yaml"
        path.write_bytes(data)
        load_config({"model": "smollm2"}, config_file=str(path))


def yaml_seeds() -> list[Any]:
    return [
        {"num_replicas": 2, "max_num_seqs": 8, "kv_cache_dtype": "auto", "api_key": ["a", "b"], "port": 8000,
         "speculative_config": {"method": "ngram", "num_speculative_tokens": 3}, "enable_prefix_caching": True},
        b"num_replicas: 2\nanchors: &a [1, 2]\nagain: *a\n",
        b"? [a, b]\n: 1\n",
        b"tree: &a [x, x, x, x, x, x, x, x, x]\n"
        + b"".join(b"k%d: &%c [%s]\n" % (n, 98 + n, b", ".join([b"*%c" % (97 + n)] * 9)) for n in range(12))
        + b"api_key: *m\nport: *m\nkv_cache_dtype: *m\nspeculative_config: {method: *m, tree: *m}\n",
        b"kv_cache_dtype: &a [*a]\n",
        b"when: 2001-12-14t21:59:43.10-05:00\nbinary: !!binary aGVsbG8=\n",
    ]  # fmt: skip


def _yaml(tree: Any) -> bytes:
    return tree if isinstance(tree, bytes) else yaml.safe_dump(tree, sort_keys=False).encode("utf-8", "replace")


def read_speculative(data: bytes) -> None:
    read_speculative_config(data.decode("utf-8", "replace"))


def speculative_seeds() -> list[Any]:
    return [
        {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3, "prompt_lookup_min": 1},
        {"method": "medusa", "model": "heads", "tree": [4, 2, 1], "adaptive": False},
        {"method": "layer_skip", "num_layers": 3, "verification": "coupled", "acceptance_threshold": 0.3},
    ]


def read_store(data: bytes) -> None:
    address = parse_store(data.decode("utf-8", "replace"))
    if address is not None:
        assert parse_store(address.url) == address


def store_seeds() -> list[Any]:
    urls = ("embedded", "redis://u:p@h:1,g:2/3?prefix=x", "rediss://h?ca=f", "redis+sentinel://:p@h/s?db=1&tls=1",
            "redis://[::1]:6379/0")  # fmt: skip
    return [url.encode() for url in urls]


def _read_trace(data: bytes, suffix: str) -> None:
    with tempfile.TemporaryDirectory(prefix="warmroot-fuzz-") as folder:
        path = Path(folder) / f"t.{suffix}"
        path.write_bytes(data)
        trace = read_trace(path)
    assert trace.requests and trace.block_tokens > 0 and trace.span_s >= 0
    superpose(spread(trace, Random(0)), 2)


def read_jsonl_trace(data: bytes) -> None:
    _read_trace(data, "jsonl")


def read_csv_trace(data: bytes) -> None:
    _read_trace(data, "csv")


def trace_seeds() -> list[Any]:
    rows = [{"timestamp": 27482 + n, "input_length": 600, "output_length": 5, "hash_ids": [1, n]} for n in range(3)]
    return [[{"block_tokens": 16}, *rows], rows]


def _lines(tree: Any) -> bytes:
    return b"\n".join(as_json(row) for row in tree)


def csv_seeds() -> list[Any]:
    head = b"TIMESTAMP,ContextTokens,GeneratedTokens\n"
    return [head + b"2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:50.9951690,396,109\n"]


def read_sse(data: bytes) -> None:
    """The same payloads however the bytes are cut."""
    whole, torn = SseReader(), SseReader()
    events = whole.feed(data)
    assert events == [event for at in range(len(data)) for event in torn.feed(data[at : at + 1])]
    assert (whole.status, whole.body) == (torn.status, torn.body)


def sse_seeds() -> list[Any]:
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
    body = b'data: {"a": 1}\n\n: keep-alive\n\ndata: [DONE]\n\n'
    chunks = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in (body[:20], body[20:]))
    error = b'HTTP/1.1 400 Bad Request\r\nContent-Type: application/json\r\nContent-Length: 7\r\n\r\n{"a":1}'
    return [head + b"Transfer-Encoding: chunked\r\n\r\n" + chunks + b"0\r\n\r\n",
            head + b"Content-Length: %d\r\n\r\n" % len(body) + body, error]  # fmt: skip


class _Answering(Endpoint):
    """An endpoint that answers everything with ``data``."""

    def __init__(self) -> None:
        super().__init__("http://127.0.0.1:1")
        self._client.close()
        self.data, self.status = b"", 200
        self._client = httpx.Client(transport=httpx.MockTransport(self._answer), base_url=self.url)

    def _answer(self, request: httpx.Request) -> httpx.Response:
        return httpx.Response(self.status, content=self.data)


@cache
def _answering() -> _Answering:
    return _Answering()


def read_answers(data: bytes) -> None:
    """Our own client, on a server that says anything: values, or an error that says what to do."""
    endpoint = _answering()
    endpoint.data = data
    for endpoint.status in (200, 500):
        for ask in (lambda: list(endpoint.stream("/v1/completions", {})), endpoint.model):
            with suppress(WarmrootError):
                ask()


def answer_seeds() -> list[Any]:
    chunk = json.dumps({"choices": [{"text": "a"}], "usage": None})
    stream = f"data: {chunk}\n\n: keep-alive\n\ndata: [DONE]\n\n".encode()
    return [stream, b'data: {"error": {"message": "no"}}\n\n', as_json({"data": [{"id": "tiny"}]}),
            as_json({"error": {"message": "no", "type": "t"}})]  # fmt: skip


TARGETS = (
    Target("yaml_config", read_yaml, yaml_seeds, (ConfigError,), _yaml),
    Target("speculative_config", read_speculative, speculative_seeds, (ValueError,), as_json),
    Target("store_url", read_store, store_seeds, (ValueError,)),
    Target("trace", read_jsonl_trace, trace_seeds, (ConfigError,), _lines),
    Target("trace_csv", read_csv_trace, csv_seeds, (ConfigError,)),
    Target("sse", read_sse, sse_seeds, (ValueError,)),
    Target("client", read_answers, answer_seeds, ()),
)
