"""Plans and results as msgpack, between the leader of a gang and its ranks.

The peer has shown the gang's token and runs the same code: what does not decode raises WireError, but fields are not
checked one by one.
"""

import sys
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import msgpack  # pyright: ignore[reportMissingTypeStubs]

from ...cluster.ids import RequestId
from ...cluster.messages import TokenLogprob
from ...cluster.sampling_params import SamplingParams
from ...kv_store.hashing import TOKEN_BYTES, pack_tokens
from ...router.wire import WireError
from .draft_tree import Draft
from .plan import BlockTables, NewSequence, SequenceResult, SequenceStep, StepPlan, StepResult

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Delivery:
    """A plan, and what has been sampled since the plan before.

    A rank that does not sample learns from ``sampled`` the tokens that its sequences have got.
    """

    plan: StepPlan
    sampled: tuple[tuple[RequestId, list[int]], ...] = ()


def encode_delivery(delivery: Delivery) -> bytes:
    """One message. Raises OverflowError for a token id that is no int32."""
    plan = delivery.plan
    return _pack(
        [
            plan.step,
            plan.finished,
            [_new_to_wire(new) for new in plan.new],
            [_step_to_wire(step) for step in plan.sequences],
            plan.copies,
            plan.least_probability,
            plan.adopts,
            delivery.sampled,
        ]
    )


def decode_delivery(data: bytes) -> Delivery:
    """Inverse of ``encode_delivery``. Raises WireError."""
    return _unpack(data, _delivery_from_wire)


def encode_result(result: StepResult) -> bytes:
    """One message."""
    return _pack([result.step, result.error, [_answer_to_wire(answer) for answer in result.sequences]])


def decode_result(data: bytes) -> StepResult:
    """Inverse of ``encode_result``. Raises WireError."""
    return _unpack(data, _result_from_wire)


def _pack(wire: list[Any]) -> bytes:
    return cast(bytes, msgpack.packb(wire))  # pyright: ignore[reportUnknownMemberType]


def _unpack(data: bytes, from_wire: Callable[[list[Any]], _T]) -> _T:
    try:
        wire = cast(Any, msgpack.unpackb(data, strict_map_key=False))  # pyright: ignore[reportUnknownMemberType]
        return from_wire(wire)
    except Exception as error:  # a peer's bytes can break msgpack and every constructor in any way
        raise WireError(f"not a message of the gang: {type(error).__name__}: {error}"[:200]) from error


def _delivery_from_wire(wire: list[Any]) -> Delivery:
    step, finished, new, sequences, copies, least_probability, adopts, sampled = wire
    plan = StepPlan(
        step=step,
        finished=tuple(finished),
        new=tuple(_new_from_wire(fields) for fields in new),
        sequences=tuple(_step_from_wire(fields) for fields in sequences),
        copies=tuple((source, destination) for source, destination in copies),
        least_probability=least_probability,
        adopts=adopts,
    )
    return Delivery(plan, tuple((request_id, token_ids) for request_id, token_ids in sampled))


def _step_to_wire(step: SequenceStep) -> tuple[Any, ...]:
    wire = (step.request_id, step.num_computed, step.num_tokens, step.samples, step.new_blocks)
    if not step.draft and not step.num_drafts:
        return wire
    return (*wire, step.num_drafts, *_draft_to_wire(step.draft))


def _step_from_wire(fields: list[Any]) -> SequenceStep:
    request_id, num_computed, num_tokens, samples, new_blocks, *rest = fields
    return SequenceStep(
        request_id=request_id,
        num_computed=num_computed,
        num_tokens=num_tokens,
        samples=samples,
        new_blocks=tuple(new_blocks),
        draft=_draft_from_wire(*rest[1:]),
        num_drafts=rest[0] if rest else 0,
    )


def _draft_to_wire(draft: Draft) -> tuple[tuple[int, ...], ...]:
    """What there is of it."""
    return tuple(part for part in (draft.token_ids, draft.parents) if part)


def _draft_from_wire(token_ids: Sequence[int] = (), parents: Sequence[int] = ()) -> Draft:
    return Draft(tuple(token_ids), tuple(parents))


def _new_to_wire(new: NewSequence) -> list[Any]:
    return [
        new.request_id,
        pack_tokens(new.token_ids),
        new.num_prompt_tokens,
        new.params.to_wire(),
        new.seed,
        new.num_computed,
        new.block_tables,
    ]


def _new_from_wire(fields: list[Any]) -> NewSequence:
    request_id, token_ids, num_prompt_tokens, params, seed, num_computed, block_tables = fields
    return NewSequence(
        request_id=request_id,
        token_ids=_unpack_tokens(token_ids),
        num_prompt_tokens=num_prompt_tokens,
        params=SamplingParams.from_wire(params),
        seed=seed,
        num_computed=num_computed,
        block_tables=cast(BlockTables, tuple(block_tables)),
    )


def _unpack_tokens(packed: bytes) -> list[int]:
    if len(packed) % TOKEN_BYTES:
        raise WireError(f"{len(packed)} bytes are not whole tokens")
    tokens = array("i", packed)
    if sys.byteorder == "big":
        tokens.byteswap()
    return tokens.tolist()


def _answer_to_wire(answer: SequenceResult) -> list[Any]:
    wire: list[Any] = [
        answer.request_id,
        answer.token_ids,
        _logprobs_to_wire(answer.logprobs),
        _logprobs_to_wire(answer.prompt_logprobs),
        answer.error,
        answer.embedding,
        *_draft_to_wire(answer.draft),
    ]
    while len(wire) > 2 and wire[-1] is None:
        wire.pop()
    return wire


def _result_from_wire(wire: list[Any]) -> StepResult:
    step, error, answers = wire
    return StepResult(step=step, error=error, sequences=[_answer_from_wire(*fields) for fields in answers])


def _answer_from_wire(
    request_id: RequestId,
    token_ids: list[int],
    logprobs: list[Any] | None = None,
    prompt: list[Any] | None = None,
    error: str | None = None,
    embedding: bytes | None = None,
    *draft: list[int],
) -> SequenceResult:
    return SequenceResult(
        request_id=request_id,
        token_ids=token_ids,
        logprobs=_logprobs_from_wire(logprobs),
        prompt_logprobs=_logprobs_from_wire(prompt),
        draft=_draft_from_wire(*draft),
        error=error,
        embedding=embedding,
    )


def _logprobs_to_wire(entries: list[TokenLogprob] | None) -> list[Any] | None:
    return None if entries is None else [(entry.token_id, entry.logprob, entry.rank, entry.top) for entry in entries]


def _logprobs_from_wire(entries: list[Any] | None) -> list[TokenLogprob] | None:
    if entries is None:
        return None
    return [
        TokenLogprob(token_id, logprob, rank, tuple((token, value) for token, value in top))
        for token_id, logprob, rank, top in entries
    ]
