"""``POST /v1/completions``."""

from fastapi import APIRouter, Request
from starlette.responses import Response

from ..output import Completion, RequestOutput
from .chunks import CompletionChunks
from .completions import CompletionBody, CompletionRequest
from .documentation import generation_responses
from .generation import Generation
from .json_route import GenerationRoute
from .limits import check_fields, check_prompts, with_output_limit
from .record import principal_of
from .responses import CLIENT_LEFT, json_response
from .service import Service


def completion_routes(service: Service) -> APIRouter:
    """The text completion API over ``service``."""
    router = APIRouter(tags=["completions"], route_class=GenerationRoute)

    @router.post("/v1/completions", responses=generation_responses(CompletionBody, CompletionBody))
    async def create_completion(request: Request, body: CompletionRequest) -> Response:
        """Continue one or several texts, whole or as server-sent events."""
        name, frontend = service.model(body.model, principal_of(request.scope))
        body.refuse_unsupported()
        check_fields(body, service.settings.limits)
        params = with_output_limit(body.to_sampling_params(), service.settings.limits)
        params = await service.grammars.applied(params, body.asked_grammar(), service.settings.limits)
        texts = body.prompts()
        check_prompts(texts, body, service.settings.limits)
        prompts = await service.texts.tokenize(
            frontend, texts, add_special_tokens=body.add_special_tokens, whole=body.truncate_prompt_tokens is None
        )
        prompts = [body.truncate(prompt, frontend.max_model_len - (params.max_tokens or 1)) for prompt in prompts]
        generation = Generation.of(service, name, frontend, request, body, prompts, params, "cmpl")
        echo = _echo(generation, body)
        if body.stream:
            return await generation.stream(_chunks(generation, echo))
        outputs = await generation.outputs()
        return CLIENT_LEFT if outputs is None else _completion(generation, outputs, echo)

    return router


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


def _completion(generation: Generation, outputs: list[RequestOutput], echo: list[str] | None) -> Response:
    body = {
        **generation.envelope.fields("text_completion"),
        "choices": [
            _choice(generation, prompt, output, choice, "" if echo is None else echo[prompt])
            for prompt, output in enumerate(outputs)
            for choice in output.completions
        ],
        "usage": generation.usage.usage().body(),
    }
    first = outputs[0]
    return json_response(body, generation.headers(first.replica, first.cached_tokens, first.first_weights))


def _choice(
    generation: Generation, prompt: int, output: RequestOutput, choice: Completion, echo: str
) -> dict[str, object]:
    body: dict[str, object] = {
        "index": prompt * generation.params.n + choice.index,
        "text": echo + choice.text,
        "logprobs": _logprobs(generation, output, choice, echo),
        "finish_reason": choice.finish_reason,
        "stop_reason": choice.stop_reason,
    }
    if generation.body.prompt_logprobs is not None:
        body["prompt_logprobs"] = generation.logprob_format.prompt(output.prompt_logprobs or [])
    if generation.body.return_token_ids:
        body |= {"prompt_token_ids": output.prompt_token_ids, "token_ids": choice.token_ids}
    return body


def _logprobs(generation: Generation, output: RequestOutput, choice: Completion, echo: str) -> dict[str, object] | None:
    if generation.params.logprobs is None:
        return None
    logprobs = choice.logprobs or []
    if not echo or output.prompt_logprobs is None:
        return generation.logprob_format.completion(choice.token_ids, logprobs, len(echo))
    token_ids = [*output.prompt_token_ids, *choice.token_ids]
    return generation.logprob_format.completion(token_ids, [*output.prompt_logprobs, *logprobs], 0)
