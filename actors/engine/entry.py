"""What an engine lets in: requests that it can compute, as long as not too many wait."""

from ...cluster.errors import ContextTooLongError, InvalidRequestError, ReplicaUnavailableError
from ...cluster.messages import GenerateRequest
from .config import EngineConfig
from .request import Request
from .waiting_queue import WaitingQueue


def check_request(source: GenerateRequest, vocab_size: int | None, max_tokens: int) -> None:
    """Raise InvalidRequestError or ContextTooLongError for what cannot be computed where sequences have ``max_tokens``,
    ReplicaUnavailableError for what another replica may have room for.
    """
    prompt = source.prompt_token_ids
    if not prompt:
        raise InvalidRequestError("prompt must have at least one token", param="prompt")
    if vocab_size is not None and not 0 <= min(prompt) <= max(prompt) < vocab_size:
        raise InvalidRequestError(f"prompt has a token id outside 0..{vocab_size - 1}", param="prompt")
    room_for_output = 0 if source.params.max_tokens == 0 else 1
    if len(prompt) + room_for_output > max_tokens:
        raise ContextTooLongError(
            f"the context is {max_tokens} tokens, but the prompt has {len(prompt)}", param="prompt"
        )
    whole = len(prompt) + (source.params.max_tokens or 0)
    if source.age and whole > max_tokens:  # it was promised as much where it comes from
        raise ReplicaUnavailableError(
            f"the request may need a context of {whole} tokens, and here it has room for {max_tokens}"
        )


def excess_tokens(request: Request, waiting: WaitingQueue, limits: EngineConfig) -> float:
    """Uncached tokens that must leave the queue before the request may wait there; one request always may."""
    if not len(waiting):
        return 0.0
    excess = 0.0
    if limits.max_num_queued_tokens is not None:
        excess = waiting.num_tokens + min(waiting.measure(request), limits.max_num_queued_tokens)
        excess -= limits.max_num_queued_tokens
    if len(waiting) >= limits.max_num_queued_reqs:
        excess = max(excess, next(iter(waiting)).uncached, 1)
    return excess
