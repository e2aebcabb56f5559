"""A TokenGenerator that plays scripts: for tests of what stands above the router."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field

from warmroot.cluster.ids import ReplicaId
from warmroot.cluster.messages import FinishReason, FirstTokenReport, GenerateRequest, TokenDelta, TokenLogprob


@dataclass(slots=True)
class Script:
    """What one sequence answers: ``steps`` are the token ids of each delta.

    ``error`` is raised after the last step, in place of a finish. ``forever`` repeats the last step until closed.
    ``max_tokens`` of the request cuts the script as an engine would.
    """

    steps: list[list[int]]
    finish_reason: FinishReason = FinishReason.STOP
    stop_reason: int | None = None
    delay: float = 0.0
    error: Exception | None = None
    cached_tokens: int = 0
    logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: list[TokenLogprob | None] | None = None
    embedding: bytes | None = None
    replica: str = "r0"
    report: FirstTokenReport | None = None
    forever: bool = False


@dataclass(slots=True)
class ScriptedGenerator:
    """Implements ``TokenGenerator``. ``script`` is one for all requests, or a function of the request.

    ``requests`` are those seen; ``started``, ``finished``, ``aborted`` (closed or cancelled before the end) and
    ``failed`` (raised) count sequences, and ``live`` those that are still open.
    """

    script: Script | Callable[[GenerateRequest], Script]
    requests: list[GenerateRequest] = field(default_factory=list)
    started: int = 0
    finished: int = 0
    aborted: int = 0
    failed: int = 0
    aborted_ids: list[str] = field(default_factory=list)

    @property
    def live(self) -> int:
        return self.started - self.finished - self.aborted - self.failed

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenDelta, None]:
        self.requests.append(request)
        script = self.script if isinstance(self.script, Script) else self.script(request)
        self.started += 1
        try:
            async for delta in _play(script, request):
                yield delta
        except (GeneratorExit, asyncio.CancelledError):
            self.aborted += 1
            self.aborted_ids.append(request.request_id)
            raise
        except Exception:
            self.failed += 1
            raise
        self.finished += 1


async def _play(script: Script, request: GenerateRequest) -> AsyncGenerator[TokenDelta, None]:
    index, number = 0, 0
    while True:
        if script.delay:
            await asyncio.sleep(script.delay)
        if number >= len(script.steps) and script.error is not None:
            raise script.error
        step = script.steps[min(number, len(script.steps) - 1)] if script.steps else []
        number += 1
        limit = request.params.max_tokens
        tokens = step if limit is None else step[: limit - index]
        end = index + len(tokens)
        reason = _finish(script, number, cut=limit is not None and end >= limit)
        yield TokenDelta(
            request_id=request.request_id,
            index=index,
            token_ids=list(tokens),
            logprobs=_logprobs(script, request, index, tokens),
            prompt_logprobs=script.prompt_logprobs if index == 0 and number == 1 else None,
            cached_tokens=script.cached_tokens if number == 1 else None,
            finish_reason=reason,
            embedding=script.embedding if reason is not None else None,
            stop_reason=script.stop_reason if reason is FinishReason.STOP else None,
            replica=ReplicaId(script.replica) if number == 1 else None,
            report=script.report if number == 1 else None,
        )
        if reason is not None:
            return
        index = end


def _finish(script: Script, number: int, *, cut: bool) -> FinishReason | None:
    last = number >= len(script.steps) and script.error is None and not script.forever
    if last and script.finish_reason is not FinishReason.LENGTH:
        return script.finish_reason
    return FinishReason.LENGTH if cut or last else None


def _logprobs(script: Script, request: GenerateRequest, index: int, tokens: list[int]) -> list[TokenLogprob] | None:
    """Those of the script, or -1.0 for each token, where the request asks for them."""
    count = request.params.logprobs
    if count is None:
        return None
    if script.logprobs is not None:
        return script.logprobs[index : index + len(tokens)]
    return [TokenLogprob(token, -1.0, 1, ((token, -1.0),) if count else ()) for token in tokens]
