"""``POST /v1/chat/completions``."""

from collections.abc import Iterator
from contextlib import contextmanager

from fastapi import APIRouter, Request
from starlette.responses import Response

from ...cluster.errors import ClientError
from ..output import Completion, RequestOutput
from .chat import ChatCompletion, ChatCompletionChunk, ChatCompletionRequest
from .chunks import ChatChunks
from .documentation import generation_responses
from .generation import Generation
from .json_route import GenerationRoute
from .limits import check_fields, check_messages, with_output_limit
from .record import principal_of
from .responses import CLIENT_LEFT, json_response
from .service import Service
from .tool_chunks import ToolChunks
from .tool_use import ToolUse


def chat_routes(service: Service) -> APIRouter:
    """The chat API over ``service``."""
    router = APIRouter(tags=["chat"], route_class=GenerationRoute)

    @router.post("/v1/chat/completions", responses=generation_responses(ChatCompletion, ChatCompletionChunk))
    async def create_chat_completion(request: Request, body: ChatCompletionRequest) -> Response:
        """Answer a conversation, whole or as server-sent events."""
        name, frontend = service.model(body.model, principal_of(request.scope))
        body.refuse_unsupported()
        check_fields(body, service.settings.limits)
        check_messages(body, service.settings.limits)
        params = with_output_limit(body.to_sampling_params(), service.settings.limits)
        calls = ToolUse.of(body, frontend, service.new_id)
        params = await service.grammars.applied(params, body.asked_grammar(), service.settings.limits)
        if calls is not None:
            params = await calls.applied(params, service)
        prompt = await service.texts.render(frontend, body, whole=body.truncate_prompt_tokens is None)
        prompt = body.truncate(prompt, frontend.max_model_len - (params.max_tokens or 1))
        generation = Generation.of(service, name, frontend, request, body, [prompt], params, "chatcmpl")
        with _naming_fields(body):
            if body.stream:
                return await generation.stream(_chunks(generation, calls))
            outputs = await generation.outputs()
        return CLIENT_LEFT if outputs is None else _completion(generation, outputs[0], calls)

    return router


@contextmanager
def _naming_fields(body: ChatCompletionRequest) -> Iterator[None]:
    """Errors name the fields that the client knows, rather than the ones that they became."""
    names = {"prompt": "messages"}
    if body.max_completion_tokens is not None:
        names["max_tokens"] = "max_completion_tokens"
    try:
        yield
    except ClientError as error:
        error.param = names.get(error.param or "", error.param)
        raise


def _chunks(generation: Generation, calls: ToolUse | None) -> ChatChunks:
    envelope, options, usage = generation.envelope, generation.chunk_options(), generation.usage
    n, prompt = generation.params.n, generation.prompts[0]
    if calls is None:
        return ChatChunks(envelope, options, usage, n=n, prompt_token_ids=prompt)
    parsers = [calls.parser() for _ in range(n)]
    return ToolChunks(envelope, options, usage, parsers=parsers, new_call_id=calls.new_call_id, prompt_token_ids=prompt)


def _completion(generation: Generation, output: RequestOutput, calls: ToolUse | None) -> Response:
    body = {
        **generation.envelope.fields("chat.completion"),
        "choices": [_choice(generation, choice, calls) for choice in output.completions],
        "usage": generation.usage.usage().body(),
    }
    if generation.params.prompt_logprobs is not None:
        body["prompt_logprobs"] = generation.logprob_format.prompt(output.prompt_logprobs or [])
    if generation.body.return_token_ids:
        body["prompt_token_ids"] = output.prompt_token_ids
    return json_response(body, generation.headers(output.replica, output.cached_tokens, output.first_weights))


def _choice(generation: Generation, choice: Completion, calls: ToolUse | None) -> dict[str, object]:
    wanted = generation.params.logprobs is not None
    message: dict[str, object] = {"role": "assistant", "content": choice.text, "refusal": None}
    reason: str | None = choice.finish_reason
    if calls is not None:
        message, reason = calls.answer(choice.text, reason)
    body = {
        "index": choice.index,
        "message": message,
        "logprobs": generation.logprob_format.chat(choice.logprobs or []) if wanted else None,
        "finish_reason": reason,
        "stop_reason": choice.stop_reason,
    }
    return {**body, "token_ids": choice.token_ids} if generation.body.return_token_ids else body
