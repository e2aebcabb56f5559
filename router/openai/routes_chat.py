"""``POST /v1/chat/completions``."""

from fastapi import APIRouter, Request
from starlette.responses import Response

from .chat import ChatCompletion, ChatCompletionChunk, ChatCompletionRequest
from .chunks import ChatChunks
from .collect import Collected
from .generation import Choices, Generation
from .responses import CLIENT_LEFT, generation_responses, json_response
from .service import Service


def chat_routes(service: Service) -> APIRouter:
    """The chat API over ``service``."""
    router = APIRouter(tags=["chat"])

    @router.post("/v1/chat/completions", responses=generation_responses(ChatCompletion, ChatCompletionChunk))
    async def create_chat_completion(request: Request, body: ChatCompletionRequest) -> Response:
        """Answer a conversation, whole or as server-sent events."""
        _, frontend = service.model(body.model)
        body.refuse_unsupported()
        params = body.to_sampling_params()
        prompt = frontend.render(body.messages_for_template(), **body.render_options())
        prompt = body.truncate(prompt, frontend.max_model_len - (params.max_tokens or 1))
        generation = Generation.of(service, request, body, [prompt], params, "chatcmpl")
        if body.stream:
            return await generation.stream(_chunks(generation, prompt))
        choices = await generation.choices()
        return CLIENT_LEFT if choices is None else _completion(generation, choices)

    return router


def _chunks(generation: Generation, prompt: list[int]) -> ChatChunks:
    return ChatChunks(
        generation.envelope,
        generation.chunk_options(),
        generation.usage,
        n=generation.params.n,
        prompt_token_ids=prompt,
    )


def _completion(generation: Generation, choices: Choices) -> Response:
    (candidates,) = choices.by_prompt
    body = {
        **generation.envelope.fields("chat.completion"),
        "choices": [_choice(generation, index, choice) for index, choice in enumerate(candidates)],
        "usage": generation.usage.usage().body(),
    }
    if generation.params.prompt_logprobs is not None:
        body["prompt_logprobs"] = generation.logprob_format.prompt(candidates[0].prompt_logprobs or [])
    if generation.body.return_token_ids:
        body["prompt_token_ids"] = generation.prompts[0]
    return json_response(body, choices.headers)


def _choice(generation: Generation, index: int, choice: Collected) -> dict[str, object]:
    logprobs = generation.params.logprobs
    body = {
        "index": index,
        "message": {"role": "assistant", "content": choice.text, "refusal": None},
        "logprobs": None if logprobs is None else generation.logprob_format.chat(choice.logprobs),
        "finish_reason": str(choice.finish_reason),
        "stop_reason": choice.stop_reason,
    }
    return {**body, "token_ids": choice.token_ids} if generation.body.return_token_ids else body
