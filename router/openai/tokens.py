"""Bodies and routes of ``/tokenize`` and ``/detokenize``, as vLLM defines them."""

from typing import Annotated, Any

from fastapi import APIRouter, Request
from pydantic import Discriminator, Field, Tag

from ...cluster.errors import InvalidRequestError
from .chat import ChatTemplateOptions
from .documentation import errors
from .json_route import JsonRoute
from .limits import check_chars, check_messages
from .protocol import RequestBody, ResponseBody
from .record import principal_of
from .service import Service


class TokenizeCompletionRequest(RequestBody):
    """A text to tokenize as a completion's prompt."""

    model: str | None = None
    """Name of a served model; without it, the first."""
    prompt: str
    """The text."""
    add_special_tokens: bool = True
    """Add the tokenizer's special tokens (such as BOS)."""
    return_token_strs: bool | None = None
    """Report each token's text as well."""


class TokenizeChatRequest(ChatTemplateOptions):
    """A conversation to render and tokenize."""

    model: str | None = None
    """Name of a served model; without it, the first."""
    return_token_strs: bool | None = None
    """Report each token's text as well."""


class TokenizeResponse(ResponseBody):
    """The tokens."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeRequest(RequestBody):
    """Token ids to turn into text."""

    model: str | None = None
    """Name of a served model; without it, the first."""
    tokens: Annotated[list[Annotated[int, Field(ge=0)]], Field(fail_fast=True)]
    """Token ids."""


class DetokenizeResponse(ResponseBody):
    """The text."""

    prompt: str


def _kind(body: Any) -> str:
    return "chat" if isinstance(body, dict) and "messages" in body else "completion"


TokenizeRequest = Annotated[
    Annotated[TokenizeCompletionRequest, Tag("completion")] | Annotated[TokenizeChatRequest, Tag("chat")],
    Discriminator(_kind),
]


def token_routes(service: Service) -> APIRouter:
    """The two routes."""
    router = APIRouter(tags=["tokens"], route_class=JsonRoute, responses=errors(400, 404, 503))

    @router.post("/tokenize")
    async def tokenize(request: Request, body: TokenizeRequest) -> TokenizeResponse:
        """The tokens of a text, or of a conversation as its template writes it."""
        _, frontend = service.model(body.model, principal_of(request.scope))
        if isinstance(body, TokenizeChatRequest):
            check_messages(body, service.settings.limits)
            tokens = await service.texts.render(frontend, body, whole=False)
        else:
            check_chars("prompt", [body.prompt], service.settings.limits)
            [tokens] = await service.texts.tokenize(
                frontend, [body.prompt], add_special_tokens=body.add_special_tokens, whole=False
            )
        texts = [frontend.tokenizer.token_text(token) for token in tokens] if body.return_token_strs else None
        return TokenizeResponse(
            count=len(tokens), max_model_len=frontend.max_model_len, tokens=tokens, token_strs=texts
        )

    @router.post("/detokenize")
    async def detokenize(request: Request, body: DetokenizeRequest) -> DetokenizeResponse:
        """The text of token ids."""
        _, frontend = service.model(body.model, principal_of(request.scope))
        if body.tokens and max(body.tokens) >= frontend.tokenizer.vocab_size:
            raise InvalidRequestError("tokens holds an id outside the vocabulary", param="tokens")
        return DetokenizeResponse(prompt=frontend.tokenizer.decode(body.tokens, skip_special_tokens=False))

    return router
