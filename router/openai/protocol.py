"""What the request and response bodies of the OpenAI API share, and the small bodies.

Requests carry OpenAI's fields and the extension fields of vLLM that clients send. Types are strict ("5" is not a
number); fields that nobody knows are ignored, as OpenAI's own SDKs rely on.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from pydantic import Field

from ...cluster.errors import InvalidRequestError
from ...cluster.sampling_params import MAX_LOGPROBS, SamplingParams
from ..request_checks import MOST_PRIORITY
from .bodies import RequestBody, ResponseBody
from .output_format import AskedGrammar, ResponseFormat, StructuredOutputs, guided, only_one


class StreamOptions(RequestBody):
    """What a stream reports beside its text."""

    include_usage: bool = False
    """A last chunk with ``choices: []`` carries the usage."""
    continuous_usage_stats: bool = False
    """Every chunk carries the usage so far."""


class GenerationRequest(RequestBody):
    """The fields that chat and text completions share."""

    model: str | None = None
    """Name of a served model; without it, the only one."""
    max_tokens: int | None = Field(None, ge=0)
    """Most tokens to generate; by default as many as the context holds."""
    temperature: float | None = None
    """0 is greedy. Default 1."""
    top_p: float | None = None
    """Sample from the smallest set of tokens with this probability. Default 1."""
    n: int | None = None
    """Completions per prompt. Default 1."""
    best_of: int | None = None
    """Generate this many and return the ``n`` likeliest."""
    stop: str | list[str] | None = None
    """Texts that end the output; they are not part of it."""
    stream: bool | None = None
    """Send server-sent events while tokens are generated."""
    stream_options: StreamOptions | None = None
    """Only with ``stream``."""
    presence_penalty: float | None = None
    """-2 to 2: positive values favour tokens that have not occurred yet."""
    frequency_penalty: float | None = None
    """-2 to 2: positive values disfavour tokens by how often they occurred."""
    logit_bias: dict[str, float] | None = None
    """Token id to a bias of -100 to 100."""
    seed: int | None = None
    """The same seed and parameters draw the same tokens."""
    user: str | None = None
    """Accepted and not used."""

    top_k: int | None = None
    """Sample from the k likeliest tokens; 0 and -1 switch it off."""
    min_p: float | None = None
    """Drop tokens less likely than this share of the likeliest."""
    repetition_penalty: float | None = None
    """Above 1 disfavours tokens of prompt and output."""
    min_tokens: int | None = None
    """No end of sequence before so many tokens."""
    ignore_eos: bool = False
    """Go on after an end-of-sequence token."""
    stop_token_ids: list[int] | None = None
    """Token ids that end the output."""
    include_stop_str_in_output: bool = False
    """Keep the stop text in the output."""
    skip_special_tokens: bool = True
    """Leave special tokens out of the text."""
    speculative: bool = True
    """Whether tokens may be drafted ahead, where the replica does that; what is likely does not change."""
    bad_words: list[str] | None = None
    """Words that must not be generated."""
    allowed_token_ids: list[int] | None = None
    """Only these tokens may be generated."""
    prompt_logprobs: int | None = None
    """Alternatives to report for each prompt token; without ``stream``."""
    truncate_prompt_tokens: int | None = Field(None, ge=-1)
    """Keep only so many tokens of the prompt; -1: as many as the context holds."""
    truncation_side: Literal["left", "right"] | None = None
    """The side that truncation cuts. Default left."""
    priority: int = Field(0, ge=-MOST_PRIORITY, le=MOST_PRIORITY)
    """Lower runs first."""
    timeout: float | None = Field(None, gt=0, le=1e6)
    """Seconds within which the whole output must be there; after that the request ends with deadline_exceeded."""
    request_id: str | None = Field(None, pattern=r"^[A-Za-z0-9._:\-]{1,128}$")
    """Used in the response's id; the header ``x-request-id`` comes first."""
    cache_salt: str | None = Field(None, min_length=1, max_length=1024)
    """Cached prefixes are shared only between requests with the same salt (and only within a tenant)."""
    session_id: str | None = Field(None, min_length=1, max_length=256)
    """Requests of a session go to the same replica if it can take them; the header ``x-session-id`` comes first."""
    return_token_ids: bool | None = None
    """Report the token ids of prompt and output."""
    return_tokens_as_token_ids: bool | None = None
    """Write tokens in logprobs as ``token_id:123``."""

    response_format: ResponseFormat | None = None
    """The form of the output: ``text``, ``json_object`` or ``json_schema``."""
    structured_outputs: StructuredOutputs | None = None
    """The form of the output, as vLLM asks for it."""
    guided_json: str | dict[str, Any] | None = None
    """A JSON schema that the output keeps to; older than ``structured_outputs``, as the following ones."""
    guided_regex: str | None = None
    """A regular expression that the whole output matches."""
    guided_choice: list[str] | None = None
    """The output is one of these."""
    guided_grammar: str | None = None
    """A grammar in GBNF or Lark that the output belongs to."""

    use_beam_search: bool | None = None
    """Not supported."""
    length_penalty: float | None = None
    """Only for beam search, which is not supported."""
    logprob_token_ids: list[int] | None = None
    """Not supported."""
    kv_transfer_params: dict[str, Any] | None = None
    """Not supported."""
    vllm_xargs: dict[str, Any] | None = None
    """Not supported."""
    repetition_detection: dict[str, Any] | None = None
    """Not supported."""
    thinking_token_budget: int | None = None
    """Not supported."""

    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "use_beam_search": (False,),
        "length_penalty": (1.0,),
        "logprob_token_ids": ([],),
        "kv_transfer_params": ({},),
        "vllm_xargs": ({},),
        "repetition_detection": ({},),
        "thinking_token_budget": (-1,),
    }
    """Known fields that cannot be served, with the values (besides null) that ask for nothing."""

    def refuse_unsupported(self) -> None:
        """Raise InvalidRequestError for a field that is known, asks for something and cannot be served."""
        given = self.model_fields_set
        for name in [name for name in self.unsupported if name in given]:
            value, harmless = getattr(self, name), self.unsupported[name]
            if value is not None and value not in harmless:
                raise InvalidRequestError(f"{name} is not supported by this server", param=name)
        if self.stream_options is not None and not self.stream:
            raise InvalidRequestError("stream_options needs stream=true", param="stream_options")
        if self.stream and self.prompt_logprobs is not None:
            raise InvalidRequestError("prompt_logprobs cannot be streamed", param="prompt_logprobs")
        if self.stream and (self.best_of or 1) > (self.n or 1):
            raise InvalidRequestError("best_of cannot be streamed when it exceeds n", param="best_of")

    def asked_grammar(self) -> AskedGrammar | None:
        """The form of the output, if it is to have one. Raises InvalidRequestError."""
        asked = guided(self.guided_json, self.guided_regex, self.guided_choice, self.guided_grammar, "guided_")
        if self.structured_outputs is not None:
            asked += self.structured_outputs.asked("structured_outputs")
        if self.response_format is not None:
            asked += filter(None, [self.response_format.grammar("response_format")])
        return only_one(asked)

    def sampling_params(self, **changed: Any) -> SamplingParams:
        """What the sampler is asked for. Raises InvalidRequestError naming the field at fault."""
        named = _SAMPLING_FIELDS & self.model_fields_set
        given = {name: value for name in named if (value := getattr(self, name)) is not None}
        stop = self.stop or ()
        return SamplingParams(
            **{
                **given,
                "stop": (stop,) if isinstance(stop, str) else tuple(stop),
                "stop_token_ids": tuple(self.stop_token_ids or ()),
                "bad_words": tuple(self.bad_words or ()),
                "allowed_token_ids": None if self.allowed_token_ids is None else tuple(self.allowed_token_ids),
                "logit_bias": _logit_bias(self.logit_bias or {}),
                **changed,
            }
        )

    def truncate(self, token_ids: list[int], room: int) -> list[int]:
        """The part of the prompt that ``truncate_prompt_tokens`` keeps; ``room`` is what the context has for it."""
        limit = self.truncate_prompt_tokens
        keep = room if limit == -1 else limit
        if keep is None or len(token_ids) <= keep:
            return token_ids
        return token_ids[:keep] if self.truncation_side == "right" else token_ids[len(token_ids) - keep :]


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of one HTTP request, over all its prompts and choices."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    weights_versions: tuple[str, ...] = ()

    def body(self) -> dict[str, Any]:
        """OpenAI's ``usage`` object."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
            **({"weights_versions": list(self.weights_versions)} if self.weights_versions else {}),
        }


class PromptTokensDetails(ResponseBody):
    """What the prompt's tokens cost."""

    cached_tokens: int
    """Prompt tokens whose KV was found in the cache."""


class UsageBody(ResponseBody):
    """Tokens of one request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | None = None
    weights_versions: list[str] | None = None
    """Weights that the tokens came from, in the order of their use."""


class ErrorDetail(ResponseBody):
    """What went wrong, in OpenAI's words."""

    message: str
    type: str
    param: str | None
    """The field at fault, as a dotted path."""
    code: str | None


class ErrorBody(ResponseBody):
    """The body of every response with a status of 400 or more."""

    error: ErrorDetail


class ModelCard(ResponseBody):
    """A served model."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "warmroot"
    root: str
    """The model behind this name."""
    max_model_len: int
    """Tokens of prompt and output together."""
    weights_versions: list[str] = Field(default_factory=list[str])
    """Versions of the weights that its replicas hold now: several while they change."""


class ModelList(ResponseBody):
    """Every served model."""

    object: Literal["list"] = "list"
    data: list[ModelCard]


_SAMPLING_FIELDS = frozenset(
    (
        "max_tokens",
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "presence_penalty",
        "frequency_penalty",
        "repetition_penalty",
        "seed",
        "min_tokens",
        "ignore_eos",
        "include_stop_str_in_output",
        "n",
        "best_of",
        "prompt_logprobs",
        "skip_special_tokens",
        "speculative",
    )
)

TopLogprobs = Field(None, ge=0, le=MAX_LOGPROBS)


def _logit_bias(biases: dict[str, float]) -> dict[int, float]:
    try:
        return {int(token_id): bias for token_id, bias in biases.items()}
    except ValueError:
        raise InvalidRequestError("logit_bias keys must be token ids", param="logit_bias") from None
