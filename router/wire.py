"""What travels between ingress and replica: frames of a 4-byte big-endian length and a msgpack array.

The array is ``[kind, field, ...]``; a delta is an array too, with empty fields at its end left out. Whatever does not
decode raises WireError, which names the fault; the connection is then closed.
"""

from dataclasses import fields
from typing import Any, TypeVar, cast

import msgpack  # pyright: ignore[reportMissingTypeStubs]

from ..cluster import errors
from ..cluster.errors import OverloadedError, ServerError, WarmrootError
from ..cluster.ids import RequestId
from ..cluster.messages import (
    FinishReason,
    GenerateRequest,
    TokenDelta,
    TokenLogprob,
)
from ..cluster.sampling_params import SamplingParams
from ..kv_store.announcements import info_from_wire, info_to_wire
from ..kv_store.hashing import pack_tokens, unpack_tokens
from .channel_messages import (
    Abort,
    Accepted,
    Answer,
    Ask,
    Deltas,
    Draining,
    Failure,
    FromLater,
    Hello,
    HelloAck,
    Message,
    Ping,
    Pong,
    Rejected,
    Submit,
    Unknown,
    Unreadable,
)
from .load_wire import counts_from_wire, counts_to_wire, load_from_wire, load_to_wire, report_from_wire

MAX_FRAME_BYTES = 64 * 2**20
MAX_HELLO_BYTES = 4096
"""Limit on a frame of a peer that has not shown the token yet."""
_LENGTH_BYTES = 4
_PARAMETERS = frozenset(spec.name for spec in fields(SamplingParams))
_T = TypeVar("_T")


class WireError(ServerError):
    """The peer sent something that is no message."""

    code = "wire_error"


def encode(message: Message) -> bytes:
    """One frame. Raises WireError above MAX_FRAME_BYTES."""
    body = cast(bytes, msgpack.packb(_to_wire(message)))
    if len(body) > MAX_FRAME_BYTES:
        raise WireError(f"a message of {len(body)} bytes exceeds {MAX_FRAME_BYTES}")
    return len(body).to_bytes(_LENGTH_BYTES, "big") + body


def decode(body: bytes) -> Message | FromLater:
    """Inverse of ``encode``, without the length. Raises WireError."""
    try:
        wire = msgpack.unpackb(body, strict_map_key=False)
        return _from_wire(cast("list[Any]", wire))
    except WireError:
        raise
    except Exception as error:  # a peer's bytes can break msgpack and every constructor in any way
        raise WireError(f"not a message: {type(error).__name__}: {error}"[:200]) from error


class FrameDecoder:
    """Cuts a byte stream into frames. ``limit`` bounds one frame and may be raised once the peer is trusted."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._buffer = bytearray()

    def feed(self, data: bytes) -> None:
        """Add bytes as they came."""
        self._buffer += data

    def next(self) -> bytes | None:
        """The next frame's body, or None until more bytes come. Raises WireError for a frame above the limit."""
        if len(self._buffer) < _LENGTH_BYTES:
            return None
        end = _LENGTH_BYTES + int.from_bytes(self._buffer[:_LENGTH_BYTES], "big")
        if end - _LENGTH_BYTES > self.limit:
            raise WireError(f"a frame of {end - _LENGTH_BYTES} bytes exceeds {self.limit}")
        if len(self._buffer) < end:
            return None
        body = bytes(memoryview(self._buffer)[_LENGTH_BYTES:end])
        del self._buffer[:end]
        return body


_KINDS: tuple[type[Message], ...] = (
    Hello,
    HelloAck,
    Submit,
    Abort,
    Accepted,
    Rejected,
    Deltas,
    Ping,
    Pong,
    Failure,
    Draining,
    Ask,
    Answer,
)
_KIND_OF = {kind: number for number, kind in enumerate(_KINDS)}


def _to_wire(message: Message) -> list[Any]:
    kind = _KIND_OF[type(message)]
    match message:
        case Deltas(deltas, load):
            return [kind, [_delta_to_wire(delta) for delta in deltas], load_to_wire(load)]
        case Hello(token, version):
            return [kind, token, version]
        case HelloAck(info, load):
            return [kind, info_to_wire(info), load_to_wire(load)]
        case Submit(request):
            return [kind, *_request_to_wire(request)]
        case Abort(request_id):
            return [kind, request_id]
        case Accepted(request_id, load):
            return [kind, request_id, load_to_wire(load)]
        case Rejected(request_id, error, load):
            return [kind, request_id, _error_to_wire(error), load_to_wire(load)]
        case Ping() | Draining():
            return [kind]
        case Pong(load, counts):
            return [kind, load_to_wire(load), counts_to_wire(counts)]
        case Failure(error):
            return [kind, _error_to_wire(error)]
        case Ask(number, what, arguments):
            return [kind, number, what, arguments]
        case Answer(number, result, error):
            return [kind, number, result, None if error is None else _error_to_wire(error)]


def _from_wire(wire: list[Any]) -> Message | FromLater:
    kind, *rest = wire
    if type(kind) is not int or kind < 0:
        raise WireError(f"no kind of message: {kind!r:.40}")
    return _known_from_wire(kind, rest) if kind < len(_KINDS) else Unknown()


def _known_from_wire(kind: int, rest: list[Any]) -> Message | FromLater:
    match _KINDS[kind].__name__, rest:
        case "Deltas", [list(deltas), load, *_]:
            return Deltas([_delta_from_wire(delta) for delta in cast("list[list[Any]]", deltas)], load_from_wire(load))
        case "Hello", [str(token), int(version), *_]:
            return Hello(token, version)
        case "HelloAck", [dict(info), load, *_]:
            return HelloAck(info_from_wire(cast("dict[str, Any]", info)), load_from_wire(load))
        case "Submit", [*request]:
            return _submit_from_wire(request)
        case "Abort", [str(request_id), *_]:
            return Abort(RequestId(request_id))
        case "Accepted", [str(request_id), load, *_]:
            return Accepted(RequestId(request_id), load_from_wire(load))
        case "Rejected", [str(request_id), error, load, *_]:
            return Rejected(RequestId(request_id), _error_from_wire(error), load_from_wire(load))
        case ("Ping" | "Draining") as name, [*_]:
            return Ping() if name == "Ping" else Draining()
        case "Pong", [load, [*counts], *_]:
            return Pong(load_from_wire(load), counts_from_wire(counts))
        case "Failure", [error, *_]:
            return Failure(_error_from_wire(error))
        case name, _:
            return _aside_from_wire(name, rest)


def _aside_from_wire(name: str, rest: list[Any]) -> Message:
    """What is not about generating."""
    match name, rest:
        case "Ask", [int(number), str(what), dict(arguments), *_]:
            return Ask(number, what, cast("dict[str, Any]", arguments))
        case "Answer", [int(number), dict(result), error, *_]:
            return Answer(number, cast("dict[str, Any]", result), None if error is None else _error_from_wire(error))
        case _:
            raise WireError(f"{name} has wrong fields")


def _request_to_wire(request: GenerateRequest) -> list[Any]:
    return [
        request.request_id,
        request.packed_prompt or pack_tokens(request.prompt_token_ids),
        request.params.to_wire(),
        pack_tokens(request.output_token_ids),
        request.priority,
        request.cache_salt,
        request.arrival,
        request.tenant,
        request.share,
        request.deadline,
        request.age,
        request.trace,
        request.is_suspect,
    ]


def _submit_from_wire(wire: list[Any]) -> Submit | Unreadable:
    unknown = set(cast("dict[str, Any]", _typed(wire[2], dict))) - _PARAMETERS
    if unknown:
        return Unreadable(RequestId(_typed(wire[0], str)), tuple(sorted(unknown)))
    return Submit(_request_from_wire(wire))


def _request_from_wire(wire: list[Any]) -> GenerateRequest:
    request_id, prompt, params, output, priority, cache_salt, arrival, tenant, share, deadline, age, trace, *more = wire
    return GenerateRequest(
        request_id=RequestId(_typed(request_id, str)),
        prompt_token_ids=_unpack_tokens(prompt),
        params=SamplingParams.from_wire(_typed(params, dict)),
        output_token_ids=_unpack_tokens(output),
        priority=_typed(priority, int),
        cache_salt=_typed(cache_salt, str),
        arrival=float(arrival),
        tenant=_typed(tenant, str),
        share=float(share),
        deadline=float(deadline),
        age=float(age),
        trace=_typed(trace, str),
        is_suspect=bool(more and more[0]),  # not told by the release before
    )


def _unpack_tokens(packed: Any) -> list[int]:
    try:
        return unpack_tokens(_typed(packed, bytes))
    except ValueError:
        raise WireError(f"{len(packed)} bytes are not whole tokens") from None


def _delta_to_wire(delta: TokenDelta) -> list[Any]:
    wire: list[Any] = [
        delta.request_id,
        delta.index,
        delta.token_ids,
        delta.finish_reason,
        delta.stop_reason,
        delta.cached_tokens,
        delta.error,
        delta.logprobs and [_logprob_to_wire(logprob) for logprob in delta.logprobs],
        delta.prompt_logprobs and [logprob and _logprob_to_wire(logprob) for logprob in delta.prompt_logprobs],
        delta.report and [delta.report.queue_s, delta.report.prefill_s],
        delta.embedding,
        delta.weights_version,
    ]
    while wire[-1] is None:
        wire.pop()
    return wire


def _delta_from_wire(wire: list[Any]) -> TokenDelta:
    if len(wire) == 3:  # nearly all of them
        return TokenDelta(
            request_id=RequestId(_typed(wire[0], str)), index=_typed(wire[1], int), token_ids=_typed(wire[2], list)
        )
    if len(wire) < 3:
        raise WireError(f"a delta of {len(wire)} fields")
    request_id, index, token_ids, finish, stop, cached, error, logprobs, prompt_logprobs, report, embedding, version = (
        *wire[:12],
        *(None,) * (12 - len(wire)),
    )
    return TokenDelta(
        request_id=RequestId(_typed(request_id, str)),
        index=_typed(index, int),
        token_ids=_typed(token_ids, list),
        finish_reason=None if finish is None else FinishReason(finish),
        stop_reason=stop,
        cached_tokens=cached,
        error=error,
        logprobs=None if logprobs is None else [_logprob_from_wire(logprob) for logprob in logprobs],
        prompt_logprobs=None
        if prompt_logprobs is None
        else [None if logprob is None else _logprob_from_wire(logprob) for logprob in prompt_logprobs],
        report=None if report is None else report_from_wire(*report),
        embedding=None if embedding is None else _typed(embedding, bytes),
        weights_version=None if version is None else _typed(version, str),
    )


def _logprob_to_wire(logprob: TokenLogprob) -> list[Any]:
    return [logprob.token_id, logprob.logprob, logprob.rank, logprob.top]


def _logprob_from_wire(wire: list[Any]) -> TokenLogprob:
    token_id, logprob, rank, top = wire
    return TokenLogprob(token_id, logprob, rank, tuple((int(token), float(value)) for token, value in top))


def _error_to_wire(error: WarmrootError) -> list[Any]:
    retry_after = error.retry_after if isinstance(error, OverloadedError) else None
    return [type(error).__name__, error.message, error.param, retry_after]


def _error_from_wire(wire: Any) -> WarmrootError:
    name, message, param, retry_after = wire
    kind = WireError if name == WireError.__name__ else getattr(errors, str(name), None)
    if not (isinstance(kind, type) and issubclass(kind, WarmrootError)):
        return ServerError(f"{name}: {message}", param=param)
    if issubclass(kind, OverloadedError):
        return kind(str(message), retry_after=float(retry_after or 0.0), param=param)
    return kind(str(message), param=param)


def _typed(value: Any, kind: type[_T]) -> _T:
    if not isinstance(value, kind):
        raise WireError(f"{kind.__name__} expected, got {type(value).__name__}")
    return value
