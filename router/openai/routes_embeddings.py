"""``POST /v1/embeddings``: prompts that are computed, and of which nothing is generated."""

import base64

import numpy as np
from fastapi import APIRouter, Request
from starlette.responses import Response

from ...cluster.errors import ClientError, EngineError, InvalidRequestError
from ..output import RequestOutput
from .documentation import ERRORS
from .embeddings import EmbeddingList, EmbeddingRequest
from .generation import Generation
from .json_route import GenerationRoute
from .limits import check_prompts
from .record import principal_of
from .responses import CLIENT_LEFT, json_response
from .service import Service


def embedding_routes(service: Service) -> APIRouter:
    """The embedding API over ``service``."""
    router = APIRouter(tags=["embeddings"], route_class=GenerationRoute)

    @router.post("/v1/embeddings", responses={200: {"model": EmbeddingList}, **ERRORS})
    async def create_embedding(request: Request, body: EmbeddingRequest) -> Response:
        """A vector for each text."""
        name, frontend = service.model(body.model, principal_of(request.scope))
        queued, texts, limits = body.queued(), body.prompts(), service.settings.limits
        try:
            check_prompts(texts, queued, limits)
            prompts = await service.texts.tokenize(
                frontend, texts, add_special_tokens=body.add_special_tokens, whole=body.truncate_prompt_tokens is None
            )
            prompts = [queued.truncate(prompt, frontend.max_model_len) for prompt in prompts]
            params = body.to_sampling_params()
            generation = Generation.of(service, name, frontend, request, queued, prompts, params, "embd")
            outputs = await generation.outputs()
        except ClientError as error:
            error.param = "input" if error.param == "prompt" else error.param
            raise
        return CLIENT_LEFT if outputs is None else _response(generation, outputs, body)

    return router


def _response(generation: Generation, outputs: list[RequestOutput], body: EmbeddingRequest) -> Response:
    fields = generation.envelope.fields("list")
    del fields["system_fingerprint"]
    tokens = generation.usage.usage().prompt_tokens
    data = [
        {"object": "embedding", "index": index, "embedding": _encoded(_vector(output, body), body)}
        for index, output in enumerate(outputs)
    ]
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    first = outputs[0]
    headers = generation.headers(first.replica, first.cached_tokens, first.first_weights)
    return json_response({**fields, "data": data, "usage": usage}, headers)


def _vector(output: RequestOutput, body: EmbeddingRequest) -> np.ndarray:
    """[dimensions] float32."""
    if output.embedding is None:
        raise EngineError("the replica sent no embedding")
    vector = np.frombuffer(output.embedding, dtype="<f4")
    if body.dimensions is not None:
        if body.dimensions > len(vector):
            reason = f"dimensions: this model's vectors have {len(vector)}"
            raise InvalidRequestError(reason, param="dimensions")
        vector = vector[: body.dimensions]
    length = float(np.linalg.norm(vector))
    return vector / np.float32(length) if body.normalize and length else vector


def _encoded(vector: np.ndarray, body: EmbeddingRequest) -> list[float] | str:
    if body.encoding_format == "base64":
        return base64.b64encode(vector.astype("<f4").tobytes()).decode()
    return vector.tolist()
