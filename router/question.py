"""What a router has to know of a request to choose for it."""

from math import inf

from ..cluster.errors import InvalidRequestError
from ..cluster.messages import GenerateRequest
from ..kv_store.hashing import pack_tokens
from .policy import RoutingRequest


def question_of(request: GenerateRequest, wall_ahead_s: float = 0.0) -> RoutingRequest:
    """What decides where it goes: the output of an earlier replica counts as prompt.

    ``wall_ahead_s``: the wall clock, which deadlines are by, less the router's.
    """
    try:
        tokens = request.packed_prompt or pack_tokens(request.prompt_token_ids)
        if request.output_token_ids:
            tokens += pack_tokens(request.output_token_ids)
    except (OverflowError, TypeError) as error:
        raise InvalidRequestError(f"the prompt has a value that is no token id: {error}", param="prompt") from error
    num_tokens = len(request.prompt_token_ids) + len(request.output_token_ids)
    limit = request.params.max_tokens
    most = inf if limit is None else max(0, limit - len(request.output_token_ids))
    return RoutingRequest(
        request.request_id,
        num_tokens,
        request.session,
        tokens,
        request.cache_salt,
        most,
        priority=request.priority,
        tenant=request.tenant,
        share=request.share,
        deadline=request.deadline - wall_ahead_s if request.deadline else inf,
        admitted=request.admitted,
        company_tokens=request.company_tokens,
    )
