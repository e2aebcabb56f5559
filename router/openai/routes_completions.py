"""``POST /v1/completions``."""

from typing import TYPE_CHECKING

from fastapi import APIRouter, Request
from starlette.responses import Response

from .chunks import CompletionChunks
from .collect import Collected
from .completions import Completion, CompletionRequest
from .generation import Choices, Generation
from .responses import CLIENT_LEFT, generation_responses, json_response
from .service import Service

if TYPE_CHECKING:
    from ..frontend import Frontend


def completion_routes(service: Service) -> APIRouter:
    """The text completion API over ``service``."""
    router = APIRouter(tags=["completions"])

    @router.post("/v1/completions", responses=generation_responses(Completion, Completion))
    async def create_completion(request: Request, body: CompletionRequest) -> Response:
        """Continue one or several texts, whole or as server-sent events."""
        _, frontend = service.model(body.model)
        body.refuse_unsupported()
        params = body.to_sampling_params()
        prompts = [_tokens(frontend, body, prompt) for prompt in body.prompts()]
        prompts = [body.truncate(prompt, frontend.max_model_len - (params.max_tokens or 1)) for prompt in prompts]
        generation = Generation.of(service, request, body, prompts, params, "cmpl")
        echo = _echo(generation, body)
        if body.stream:
            return await generation.stream(_chunks(generation, echo))
        choices = await generation.choices()
        return CLIENT_LEFT if choices is None else _completion(generation, choices, echo)

    return router


def _tokens(frontend: "Frontend", body: CompletionRequest, prompt: str | list[int]) -> list[int]:
    if isinstance(prompt, list):
        return prompt
    return frontend.tokenize(prompt, add_special_tokens=body.add_special_tokens)


def _echo(generation: Generation, body: CompletionRequest) -> list[str] | None:
    """The text of each prompt, if it is to stand before the output."""
    if not body.echo:
        return None
    given = body.prompts() if body.truncate_prompt_tokens is None else generation.prompts
    decode = generation.frontend.tokenizer.decode
    return [prompt if isinstance(prompt, str) else decode(prompt) for prompt in given]


def _chunks(generation: Generation, echo: list[str] | None) -> CompletionChunks:
    return CompletionChunks(
        generation.envelope,
        generation.chunk_options(),
        generation.usage,
        n=generation.params.n,
        prompt_token_ids=generation.prompts,
        echo=echo,
    )


def _completion(generation: Generation, choices: Choices, echo: list[str] | None) -> Response:
    body = {
        **generation.envelope.fields("text_completion"),
        "choices": [
            _choice(generation, prompt, index, choice, "" if echo is None else echo[prompt])
            for prompt, candidates in enumerate(choices.by_prompt)
            for index, choice in enumerate(candidates)
        ],
        "usage": generation.usage.usage().body(),
    }
    return json_response(body, choices.headers)


def _choice(generation: Generation, prompt: int, index: int, choice: Collected, echo: str) -> dict[str, object]:
    body: dict[str, object] = {
        "index": prompt * generation.params.n + index,
        "text": echo + choice.text,
        "logprobs": _logprobs(generation, prompt, choice, echo),
        "finish_reason": str(choice.finish_reason),
        "stop_reason": choice.stop_reason,
    }
    if generation.body.prompt_logprobs is not None:
        body["prompt_logprobs"] = generation.logprob_format.prompt(choice.prompt_logprobs or [])
    if generation.body.return_token_ids:
        body |= {"prompt_token_ids": generation.prompts[prompt], "token_ids": choice.token_ids}
    return body


def _logprobs(generation: Generation, prompt: int, choice: Collected, echo: str) -> dict[str, object] | None:
    if generation.params.logprobs is None:
        return None
    echoed = choice.prompt_logprobs if echo else None
    if echoed is None:
        return generation.logprob_format.completion(choice.token_ids, choice.logprobs, len(echo))
    token_ids = [*generation.prompts[prompt], *choice.token_ids]
    return generation.logprob_format.completion(token_ids, [*echoed, *choice.logprobs], 0)
