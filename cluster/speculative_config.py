"""How tokens are drafted ahead of the model, and when a draft counts as good."""

from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from .config_errors import explain_invalid, unknown_key
from .damaged import MISTAKES
from .errors import ConfigError

MethodName = Literal["ngram", "draft_model", "layer_skip", "medusa"]
VerificationName = Literal["rejection", "coupled"]


class SpeculativeConfig(BaseModel):
    """Speculative decoding: a step verifies several drafted tokens at once. Names follow vLLM where it has them.

    Unless ``acceptance_threshold`` is set, what is generated is distributed as without.
    """

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True, protected_namespaces=()
    )

    method: MethodName
    """ngram: what followed the same tokens before. draft_model: a smaller model. layer_skip: its own first layers.
    medusa: heads on its last layer, which guess several places at once."""
    num_speculative_tokens: int = Field(4, ge=1, le=32)
    """Most tokens drafted for one step of a sequence; of medusa, most nodes of a tree."""
    model: str | None = Field(default=None, min_length=1)
    """Of draft_model: folder, GGUF file or hub id of a model of the same tokenizer. Of medusa: folder of the heads."""
    tree: tuple[Annotated[int, Field(ge=1, le=32)], ...] | None = Field(default=None, min_length=1, strict=False)
    """Of medusa: most guesses of the first head, the second … that a tree has at each node, as [4, 2, 1]. [1, 1] is a
    chain of two. Default: 10 of each head, 3 of a recurrent one, four deep."""
    num_layers: int | None = Field(default=None, ge=1)
    """Of layer_skip: layers that draft. Default: a third of the model's."""
    prompt_lookup_max: int = Field(4, ge=1, le=16)
    """Of ngram: the longest run of last tokens that is looked up."""
    prompt_lookup_min: int = Field(2, ge=1, le=16)
    """Of ngram: the shortest."""
    adaptive: bool = True
    """Draft fewer tokens, or none, where measured acceptance and step times say that more would slow things down."""
    verification: VerificationName = "rejection"
    """How drafts are sampled above temperature 0. rejection: accepted most often. coupled: a seed gives the very tokens
    that it gives without speculation."""
    acceptance_threshold: float | None = Field(default=None, gt=0, lt=1)
    """Lossy: at temperatures above 0 also accept what is this likely, less so where the model is unsure (typical
    acceptance). Default: off, exact."""

    @property
    def drafts_on_ranks(self) -> bool:
        """Whether drafts come from layers, rather than from the tokens alone."""
        return self.method != "ngram"

    @property
    def drafts_with_model(self) -> bool:
        """Whether ``model`` is a model, rather than heads of the one that verifies."""
        return self.method == "draft_model"

    def drafting_layers(self, num_layers: int) -> int:
        """Of layer_skip: how many of a model's ``num_layers`` draft. Raises ConfigError if these are not fewer."""
        count = self.num_layers or max(1, num_layers // 3)
        if count >= num_layers:
            raise ConfigError(
                f"speculative_config: num_layers must be less than the model's {num_layers}, got {count}",
                param="speculative_config",
            )
        return count

    @model_validator(mode="after")
    def _fits_together(self) -> "SpeculativeConfig":
        has_model = self.method in ("draft_model", "medusa")
        if has_model and self.model is None:
            raise ValueError(f"{self.method} needs a model")
        if not has_model and self.model is not None:
            raise ValueError(f"model is for draft_model and medusa, not for {self.method}")
        if self.method != "medusa" and self.tree is not None:
            raise ValueError(f"tree is for medusa, not for {self.method}")
        if self.method != "layer_skip" and self.num_layers is not None:
            raise ValueError(f"num_layers is for layer_skip, not for {self.method}")
        if self.prompt_lookup_min > self.prompt_lookup_max:
            raise ValueError("prompt_lookup_min must not exceed prompt_lookup_max")
        return self


def read_speculative_config(value: Any) -> Any:
    """From a mapping, or a text with one in JSON or YAML; anything else is returned as it is. Raises ValueError."""
    if isinstance(value, str):
        try:
            value = yaml.safe_load(value)
        except (yaml.YAMLError, *MISTAKES) as error:
            reason, _, _ = str(error).partition("\n")
            raise ValueError(f"neither JSON nor YAML: {reason}") from error
    if not isinstance(value, dict):
        return value  # pyright: ignore[reportUnknownVariableType]
    try:
        return SpeculativeConfig.model_validate(value)
    except ValidationError as error:
        raise ValueError(_explained(error)) from None


def _explained(error: ValidationError) -> str:
    first = error.errors()[0]
    if not first["loc"]:
        return first["msg"].removeprefix("Value error, ")
    key = str(first["loc"][0])
    if first["type"] == "extra_forbidden":
        return unknown_key(key, key, SpeculativeConfig.model_fields)
    if first["type"] == "missing":
        return f"{key}: missing"
    return ": ".join(explain_invalid(error, secret=frozenset()))
