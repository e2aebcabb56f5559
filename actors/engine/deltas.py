"""Deltas that no step brings, and what a first delta tells of the time before it."""

from ...cluster.messages import FinishReason, FirstTokenReport, TokenDelta
from .plan import SequenceResult
from .request import Request


def too_late(request: Request) -> str:
    """How far a request came whose time is up."""
    done = f"after {request.num_output} tokens" if request.num_output else "before its first token"
    return f"the request's deadline passed {done}"


def last_delta(
    request: Request, reason: FinishReason, stop_reason: int | None = None, error: str | None = None
) -> TokenDelta:
    """The end of a request, without a token."""
    return TokenDelta(
        request_id=request.id,
        index=request.num_output,
        token_ids=[],
        cached_tokens=None if request.reported else request.cached_tokens or 0,
        finish_reason=reason,
        stop_reason=stop_reason,
        error=error,
    )


def report(request: Request, now: float) -> FirstTokenReport:
    """Of a request whose first token came ``now``, by the engine's clock."""
    return FirstTokenReport(queue_s=request.started_at - request.queued_at, prefill_s=now - request.started_at)


def without_token(answer: SequenceResult | None) -> tuple[tuple[FinishReason, None], str]:
    """Why a sequence ends that was to get a token: (finish reason and stop token, error)."""
    if answer is not None and answer.error is not None:
        return (FinishReason.REFUSED, None), answer.error
    return (FinishReason.ERROR, None), "the step sampled no token"
