"""Spans of a replica's requests: the wait in the engine, prefill and decode, under the span that sent them there."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..cluster.ids import ReplicaId, RequestId
from ..cluster.messages import GenerateRequest, TokenDelta
from .tracing import Tracing


@dataclass(slots=True)
class _Open:
    parent: str
    prompt_tokens: int
    began_ns: int
    first_ns: int = 0
    output_tokens: int = 0


class EngineSpans:
    """Told of every request that is traced, and of all deltas."""

    def __init__(self, tracing: Tracing, replica: ReplicaId) -> None:
        self._tracing = tracing
        self._replica = replica
        self._open: dict[RequestId, _Open] = {}

    def began(self, request: GenerateRequest) -> None:
        """The engine has taken a request."""
        if request.trace:
            num_tokens = len(request.prompt_token_ids) + len(request.output_token_ids)
            self._open[request.request_id] = _Open(request.trace, num_tokens, self._tracing.now_ns())

    def saw(self, deltas: Sequence[TokenDelta]) -> None:
        """A step has brought deltas."""
        if not self._open:
            return
        for delta in deltas:
            if (one := self._open.get(delta.request_id)) is None:
                continue
            if not one.first_ns:
                self._first(one, delta)
            one.output_tokens += len(delta.token_ids)
            if delta.finish_reason is not None:
                self.ended(delta.request_id, str(delta.finish_reason))

    def ended(self, request_id: RequestId, reason: str = "abort") -> None:
        """Nothing more comes of a request; unknown ids are fine."""
        one = self._open.pop(request_id, None)
        if one is not None and one.first_ns:
            attributes = {"gen_ai.usage.output_tokens": one.output_tokens, "warmroot.finish_reason": reason}
            self._record("decode", one, one.first_ns, self._since(one.first_ns), attributes)
        elif one is not None:
            self._record("queue", one, one.began_ns, self._since(one.began_ns), {"warmroot.finish_reason": reason})

    def _first(self, one: _Open, delta: TokenDelta) -> None:
        one.first_ns = self._tracing.now_ns()
        report, cached = delta.report, delta.cached_tokens or 0
        if report is None:
            return
        prefill_ns = one.first_ns - round(report.prefill_s * 1e9)
        self._record("queue", one, prefill_ns - round(report.queue_s * 1e9), report.queue_s, {})
        attributes = {"gen_ai.usage.input_tokens": one.prompt_tokens, "warmroot.cached_tokens": cached}
        self._record("prefill", one, prefill_ns, report.prefill_s, attributes)

    def _since(self, ns: int) -> float:
        return (self._tracing.now_ns() - ns) / 1e9

    def _record(self, name: str, one: _Open, start_ns: int, seconds: float, attributes: dict[str, Any]) -> None:
        facts = {"warmroot.replica": self._replica, **attributes}
        self._tracing.record(name, one.parent, facts, start_ns=start_ns, seconds=seconds)
