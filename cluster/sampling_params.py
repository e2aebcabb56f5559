"""What a request asks of the sampler, validated where it is made."""

from dataclasses import dataclass, field, fields
from typing import Any, Literal, cast

from .errors import InvalidRequestError
from .output_grammar import OutputGrammar

MAX_LOGPROBS = 20
MAX_COMPLETIONS = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling parameters of one request, with OpenAI's and vLLM's names and meanings.

    ``temperature=0`` is greedy. ``top_k=0`` and ``-1`` switch top-k off. ``max_tokens=None`` means up to the
    model's context. ``seed=None`` draws one where the request enters the cluster, so that a request that
    moves to another replica continues with the same draws. ``logprobs`` and ``prompt_logprobs`` count the
    alternatives to report beside the chosen token (0: the chosen one only; None: none at all).

    Raises InvalidRequestError with ``param`` set to the field at fault.
    """

    max_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = field(default_factory=dict[int, float])
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[str, ...] = ()
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()
    """``bad_words`` as token ids: filled in where the tokenizer is, read by the sampler."""
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    min_tokens: int = 0
    ignore_eos: bool = False
    n: int = 1
    best_of: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    speculative: bool = True
    """Whether tokens may be drafted ahead, where the replica does that."""
    grammar: OutputGrammar | None = None
    """What the output must look like. It ends where the grammar does."""
    pooling: Literal["last", "mean"] | None = None
    """In place of an output, a vector of the prompt: the last token's hidden state, or the mean of all."""

    def __post_init__(self) -> None:
        for name, low, high in _RANGES:
            value: float | None = getattr(self, name)
            if value is not None and not low <= value <= high:  # also refuses NaN
                raise InvalidRequestError(f"{name} must be between {low:g} and {high:g}, got {value}", param=name)
        if self.top_p == 0.0:
            raise InvalidRequestError("top_p must be greater than 0; for greedy use temperature=0", param="top_p")
        if self.repetition_penalty <= 0.0:
            raise InvalidRequestError("repetition_penalty must be greater than 0", param="repetition_penalty")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequestError(
                f"min_tokens ({self.min_tokens}) must not exceed max_tokens ({self.max_tokens})",
                param="min_tokens",
            )
        if self.best_of is not None and self.best_of < self.n:
            raise InvalidRequestError(f"best_of ({self.best_of}) must be at least n ({self.n})", param="best_of")
        if any(not text for text in self.stop):
            raise InvalidRequestError("stop must not contain empty strings", param="stop")
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise InvalidRequestError("allowed_token_ids must not be empty", param="allowed_token_ids")
        if any(not -100.0 <= bias <= 100.0 for bias in self.logit_bias.values()):
            raise InvalidRequestError("logit_bias values must be between -100 and 100", param="logit_bias")
        if self.pooling is not None and self.max_tokens != 0:
            raise InvalidRequestError("pooling generates nothing: it needs max_tokens=0", param="max_tokens")
        if self.grammar is not None and (self.min_tokens or self.ignore_eos):
            name = "min_tokens" if self.min_tokens else "ignore_eos"
            raise InvalidRequestError(f"{name} excludes structured output, which ends by itself", param=name)

    @property
    def greedy(self) -> bool:
        """True when the most probable token is taken, without a draw."""
        return self.temperature == 0.0

    @property
    def needs_history(self) -> bool:
        """True when the logits depend on the tokens so far (penalties)."""
        return self.presence_penalty != 0.0 or self.frequency_penalty != 0.0 or self.repetition_penalty != 1.0

    def to_wire(self) -> dict[str, Any]:
        """The fields that differ from their defaults, as msgpack can carry them."""
        return {name: value for name, default in _DEFAULTS if (value := getattr(self, name)) != default}

    @classmethod
    def from_wire(cls, values: dict[str, Any]) -> "SamplingParams":
        """Inverse of ``to_wire`` (msgpack returns lists for tuples)."""
        given = {name: _tuples(value) for name, value in values.items()}
        if given.get("grammar") is not None:
            kind, text = given["grammar"]
            given["grammar"] = OutputGrammar(kind, str(text))
        return cls(**given)


def _tuples(value: Any) -> Any:
    return tuple(_tuples(item) for item in cast("list[Any]", value)) if isinstance(value, list) else value


_RANGES: tuple[tuple[str, float, float], ...] = (
    ("max_tokens", 0, 2**31),
    ("temperature", 0.0, 100.0),
    ("top_p", 0.0, 1.0),
    ("top_k", -1, 2**31),
    ("min_p", 0.0, 1.0),
    ("presence_penalty", -2.0, 2.0),
    ("frequency_penalty", -2.0, 2.0),
    ("repetition_penalty", 0.0, 100.0),
    ("seed", -(2**63), 2**64 - 1),
    ("min_tokens", 0, 2**31),
    ("n", 1, MAX_COMPLETIONS),
    ("best_of", 1, MAX_COMPLETIONS),
    ("logprobs", 0, MAX_LOGPROBS),
    ("prompt_logprobs", 0, MAX_LOGPROBS),
)
_DEFAULTS = tuple((f.name, getattr(SamplingParams(), f.name)) for f in fields(SamplingParams))
