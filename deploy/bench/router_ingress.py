"""What an ingress spends on a request besides tokenising: HTTP application, template, decision, channel, answer."""

import asyncio
import json
import time
from array import array
from collections.abc import AsyncIterator, MutableMapping
from typing import Any

from tokenizers import Tokenizer as Backend
from tokenizers import decoders, pre_tokenizers
from tokenizers.models import BPE

from ...cluster.engine_counts import EngineCounts
from ...cluster.ids import ReplicaId
from ...cluster.messages import FinishReason, GenerateRequest, Load, ReplicaInfo, TokenDelta
from ...kv_store.bus import InMemoryBus
from ...kv_store.index import PrefixIndex
from ...router import wire
from ...router.byte_alphabet import BYTE_TO_CHAR
from ...router.dispatch import Dispatcher
from ...router.frontend import Frontend
from ...router.membership import Membership, ReplicaStream
from ...router.openai.app import build_app
from ...router.openai.settings import ApiSettings
from ...router.policy import make_policy
from ...router.tokenizer import Tokenizer
from ...router.tokenizer_parts import TokenizerParts
from .router_load import BLOCK_SIZE, PROMPT_TOKENS, FleetLoad
from .router_measure import Timed, quietest

PROMPT_BYTES = 20_000
PATH = "/v1/chat/completions"
_MODEL = "bench"
_TEMPLATE = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
_LEASE_S = 3600.0
_VOCABULARY = 256


def ingress(load: FleetLoad, index: PrefixIndex, num_requests: int) -> Timed:
    """CPU of the whole application for chat requests of PROMPT_BYTES that replicas answer at once with one token."""
    loop = new_loop()
    try:
        call = loop.run_until_complete(application(load, index))
        return quietest(lambda: loop.run_until_complete(_timed(call, request_body(), num_requests)))
    finally:
        loop.close()


def new_loop() -> asyncio.AbstractEventLoop:
    """What Ray's actors run on."""
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


def request_body() -> bytes:
    """A chat request with PROMPT_BYTES of text."""
    return json.dumps({"model": _MODEL, "messages": [{"role": "user", "content": "x" * PROMPT_BYTES}]}).encode()


async def _timed(application: Any, body: bytes, num_requests: int) -> Timed:
    taken: list[int] = []
    for _ in range(num_requests):
        begin = time.thread_time_ns()
        await _post(application, body)
        taken.append(time.thread_time_ns() - begin)
    return Timed.from_ns(taken)


async def application(load: FleetLoad, index: PrefixIndex) -> Any:
    """The API over replicas of ``load`` that are objects in this process."""
    bus = InMemoryBus(time.monotonic, "bench")
    for info in load.infos():
        await bus.heartbeat(info, _LEASE_S)
    tokenizer = _Tokenized(load, index)
    membership = Membership(bus, "", index=index, connect=lambda info, on_change: _Replica(info, tokenizer.held))
    for _ in range(2):
        await membership.follower.follow_once(0.0)
    dispatcher = Dispatcher(membership, make_policy())
    frontend = Frontend(dispatcher, tokenizer, model=_MODEL, max_model_len=2 * PROMPT_TOKENS)
    return build_app({_MODEL: frontend}, ApiSettings(), dispatcher)


async def _post(application: Any, body: bytes) -> None:
    waiting = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> MutableMapping[str, Any]:
        if not waiting:
            await asyncio.Event().wait()
        return waiting.pop()

    async def send(message: MutableMapping[str, Any]) -> None:
        if message.get("status", 200) != 200:
            raise RuntimeError(f"status {message['status']}")

    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": PATH,
        "raw_path": PATH.encode(),
        "root_path": "",
        "query_string": b"",
        "headers": [
            (b"host", b"localhost"),
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
        ],
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 1),
    }
    await application(scope, receive, send)


class _Tokenized(Tokenizer):
    """Has the ids of the next prompt at hand; they are bytes, as is the vocabulary."""

    def __init__(self, load: FleetLoad, index: PrefixIndex) -> None:
        backend = Backend(BPE(vocab={BYTE_TO_CHAR[byte]: byte for byte in range(_VOCABULARY)}, merges=[]))
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        backend.decoder = decoders.ByteLevel()
        super().__init__(TokenizerParts(backend, {}, _TEMPLATE))
        self.vocab_size, self.longest_token = 2**31 - 1, None  # the ids are not those of the text
        packed = load.prompts(64)
        self._prompts = [array("i", tokens).tolist() for tokens in packed]
        held = [index.match(load.root, tokens, BLOCK_SIZE) for tokens in packed]
        self.held = {id(prompt): found for prompt, found in zip(self._prompts, held, strict=True)}
        """By a prompt's list: what each replica has of it."""
        self._next = 0

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """The next prepared prompt."""
        self._next += 1
        return self._prompts[self._next % len(self._prompts)]


class _Replica:
    """``ReplicaClient`` that encodes what it would send and answers with one token. It finds what it ``held``."""

    connected = True
    draining = False

    def __init__(self, info: ReplicaInfo, held: dict[int, dict[ReplicaId, int]]) -> None:
        self._name = info.replica
        self._held = held
        self.load = Load(kv_total_blocks=info.kv_total_blocks, max_num_seqs=info.max_num_seqs)
        self.counts = EngineCounts()

    def start(self) -> None:
        """It needs no connection."""

    async def close(self) -> None:
        """It has no connection."""

    async def ask(self, what: str, arguments: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        """It has nothing but tokens."""
        return {}

    async def submit(self, request: GenerateRequest) -> ReplicaStream:
        """One token."""
        wire.encode(wire.Submit(request))
        return _OneToken(request, self._held[id(request.prompt_token_ids)].get(self._name, 0))


class _OneToken:
    def __init__(self, request: GenerateRequest, cached_tokens: int) -> None:
        self._deltas = iter(
            [
                TokenDelta(
                    request_id=request.request_id,
                    index=0,
                    token_ids=[65],
                    cached_tokens=cached_tokens,
                    finish_reason=FinishReason.LENGTH,
                )
            ]
        )

    def __aiter__(self) -> AsyncIterator[TokenDelta]:
        return self

    async def __anext__(self) -> TokenDelta:
        for delta in self._deltas:
            return delta
        raise StopAsyncIteration

    def close(self) -> None:
        """Nothing is open."""
