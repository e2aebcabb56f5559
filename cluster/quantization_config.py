"""How a published checkpoint was quantised: ``quantization_config`` of its config.json, as GPTQ and AWQ tools write it.

Formats: AutoGPTQ (v1, and v2 of gptqmodel), AutoAWQ's GEMM layout. What cannot be read is refused by name.
"""

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import AliasChoices, BaseModel, ConfigDict, Field, ValidationError

from .errors import ConfigError

GROUP_SIZES = (-1, 32, 64, 128)
_BITS = {"gptq": (4, 8), "awq": (4,)}
_CODED_LAYERS = ".layers."


class QuantizationConfig(BaseModel):
    """Settings of a checkpoint. Fields that change nothing for a reader (damping, data, backends) are left out."""

    model_config = ConfigDict(frozen=True, extra="ignore", populate_by_name=True)

    quant_method: Literal["gptq", "awq"]
    bits: Literal[4, 8] = Field(validation_alias=AliasChoices("bits", "w_bit"))
    group_size: int = Field(128, validation_alias=AliasChoices("group_size", "q_group_size"))
    """Input features that share a scale; -1: all of them."""
    sym: bool = True
    """GPTQ: the zero of every group is 2^(bits - 1)."""
    desc_act: bool = False
    """GPTQ: features were quantised in the order of their activations, and belong to any group."""
    checkpoint_format: str = "gptq"
    """GPTQ: gptq stores zeros less one, gptq_v2 as they are."""
    lm_head: bool = False
    """GPTQ: the head is quantised too."""
    modules_in_block_to_quantize: tuple[tuple[str, ...], ...] | tuple[str, ...] | None = None
    """GPTQ: the linears of a layer that are quantised. Default: all."""
    modules_to_not_convert: tuple[str, ...] | None = None
    """AWQ: parts of names of linears that are not quantised."""
    zero_point: bool = True
    version: str = "gemm"
    """AWQ: how codes are laid out."""
    dynamic: Mapping[str, Any] | None = None
    """GPTQ: rules for single modules."""

    @classmethod
    def of(cls, found: Mapping[str, Any]) -> "QuantizationConfig":
        """Read what a config.json says. Raises ConfigError, naming the setting, for what cannot be read."""
        method = found.get("quant_method")
        if not isinstance(method, str) or method not in _BITS:
            raise _refusal(f"weights quantised with {method or 'no named method'} are not supported; gptq and awq are")
        bits = found.get("bits", found.get("w_bit"))
        if bits not in _BITS[method]:
            raise _refusal(f"{method} with bits {bits} is not supported; {_only(_BITS[method])}")
        try:
            config = cls.model_validate(dict(found))
        except ValidationError as error:
            first = error.errors()[0]
            raise _refusal(f"{method} with {'.'.join(map(str, first['loc']))}: {first['msg'].lower()}") from error
        problem = config._problem()
        if problem:
            raise _refusal(f"{method} with {problem}")
        return config

    @property
    def name(self) -> str:
        """``gptq-int4-g128``; groups of a whole row have no size."""
        size = "" if self.group_size < 0 else f"-g{self.group_size}"
        return f"{self.quant_method}-int{self.bits}{size}"

    def name_as(self, form: str) -> str:
        """Of weights that were dequantised and became something else."""
        return f"{self.name}-as-{form}"

    def name_beside(self, dtype: str) -> str:
        """Of weights as they are, beside floats of a dtype."""
        return self.name if dtype == "float16" else f"{self.name}+{dtype}"

    @property
    def has_zeros(self) -> bool:
        """Whether groups have zeros of their own."""
        return self.quant_method == "awq" or not self.sym

    def group_of(self, in_features: int) -> int:
        """Input features of a group, of a linear that has so many."""
        return in_features if self.group_size < 0 else self.group_size

    def quantises(self, weight: str) -> bool:
        """Whether the linear whose weight has this name is quantised, as far as the settings tell."""
        module = weight.removesuffix(".weight")
        if module == "lm_head":
            return self.lm_head
        if _CODED_LAYERS not in module or any(part in module for part in self.modules_to_not_convert or ()):
            return False
        listed = self.modules_in_block_to_quantize
        return listed is None or any(module.endswith(part) for part in _flat(listed))

    def _problem(self) -> str | None:
        if self.group_size not in GROUP_SIZES:
            return f"group_size {self.group_size} is not supported; {_only(GROUP_SIZES)}"
        if self.quant_method == "awq":
            if self.version.lower() != "gemm":
                return f"version {self.version} is not supported; gemm is"
            return None if self.zero_point else "zero_point false is not supported; true is"
        if self.checkpoint_format not in ("gptq", "gptq_v2"):
            return f"checkpoint_format {self.checkpoint_format} is not supported; gptq and gptq_v2 are"
        return "dynamic is not supported: all linears need the same bits and group_size" if self.dynamic else None


def _refusal(message: str) -> ConfigError:
    return ConfigError(f"quantization_config: {message}", param="quantization")


def _only(values: tuple[int, ...]) -> str:
    *first, last = map(str, values)
    return f"{', '.join(first)} and {last} are" if first else f"{last} is"


def _flat(names: tuple[tuple[str, ...], ...] | tuple[str, ...]) -> list[str]:
    return [part for entry in names for part in ((entry,) if isinstance(entry, str) else entry)]
