"""How a model is to be quantised: checked values, and what config.json says of them."""

from dataclasses import dataclass
from typing import Any, Literal, get_args

from ...cluster.errors import ConfigError

Method = Literal["rtn", "gptq", "awq"]
ActOrder = Literal["none", "static", "dynamic"]
"""Order in which GPTQ rounds columns: as they come, or those with the largest inputs first. ``static`` keeps groups of
neighbouring columns; ``dynamic`` makes groups of columns that follow one another in that order (``g_idx``)."""

BITS = (4, 8)
GROUP_SIZES = (-1, 32, 64, 128)
WHOLE_ROWS = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizeSettings:
    """Raises ConfigError, naming the flag, for what the method or its layout cannot hold."""

    method: Method
    bits: int = 4
    group_size: int = 128
    """Inputs that share a scale; -1: all of a row."""
    symmetric: bool = False
    """The zero point is the middle of the codes."""
    act_order: ActOrder | None = None
    """GPTQ only; None: static."""
    damping: float = 0.01
    """GPTQ only: share of the mean of the Hessian's diagonal that is added to it."""

    def __post_init__(self) -> None:
        """See the class."""
        _check("method", self.method, get_args(Method))
        _check("bits", self.bits, BITS)
        _check("group-size", self.group_size, GROUP_SIZES)
        if self.act_order is not None:
            _check("act-order", self.act_order, get_args(ActOrder))
            self._only_for("act-order", "", self.method == "gptq", "gptq, which rounds column by column")
        if self.method == "awq":
            self._only_for("bits", " 8", self.bits == 4, "rtn and gptq; AWQ's layout holds 4 bits")
            self._only_for("symmetric", "", not self.symmetric, "rtn and gptq; AWQ's kernels read zero points")
        if not 0.0 < self.damping < 1.0:
            raise ConfigError(f"--damping: should be between 0 and 1, not {self.damping:g}", param="damping")

    @property
    def order(self) -> ActOrder:
        """Of the columns."""
        if self.method != "gptq":
            return "none"
        return self.act_order or "static"

    @property
    def max_code(self) -> int:
        """Codes are 0 ... this."""
        return 2**self.bits - 1

    @property
    def needs_inputs(self) -> bool:
        """Whether the method looks at activations."""
        return self.method != "rtn"

    def group_of(self, in_features: int) -> int:
        """Inputs of a group of a linear."""
        return in_features if self.group_size == WHOLE_ROWS else self.group_size

    def check_shape(self, name: str, out_features: int, in_features: int) -> None:
        """Raises ConfigError for a linear that the layout cannot hold."""
        per_word = 32 // self.bits
        if out_features % per_word or in_features % per_word:
            raise ConfigError(
                f"--bits: {name} is [{out_features}, {in_features}]; both must be multiples of {per_word} to be packed"
                f" with {self.bits} bits",
                param="bits",
            )
        if self.method == "awq" and in_features % self.group_of(in_features):
            raise ConfigError(
                f"--group-size: {name} has {in_features} inputs, which AWQ's layout cannot cut into groups of"
                f" {self.group_size}; use {self._fitting(in_features)}, or --method gptq",
                param="group-size",
            )

    def config(self) -> dict[str, Any]:
        """``quantization_config`` of config.json, as AutoAWQ and AutoGPTQ write it."""
        if self.method == "awq":
            return {
                "quant_method": "awq",
                "bits": self.bits,
                "group_size": self.group_size,
                "zero_point": True,
                "version": "gemm",
                "modules_to_not_convert": None,
            }
        return {
            "quant_method": "gptq",
            "bits": self.bits,
            "group_size": self.group_size,
            "desc_act": self.order == "dynamic",
            "static_groups": self.order == "static",
            "sym": self.symmetric,
            "true_sequential": self.method == "gptq",
            "damp_percent": self.damping,
            "checkpoint_format": "gptq",
            "lm_head": False,
        }

    def _fitting(self, in_features: int) -> str:
        sizes = [str(size) for size in GROUP_SIZES if size == WHOLE_ROWS or in_features % size == 0]
        return " or ".join(sizes)

    def _only_for(self, flag: str, value: str, allowed: bool, reason: str) -> None:
        if not allowed:
            raise ConfigError(f"--{flag}{value}: not with --method {self.method}; only for {reason}", param=flag)


def _check(flag: str, value: object, allowed: tuple[object, ...]) -> None:
    if value not in allowed:
        raise ConfigError(f"--{flag}: {value!r} is not one of {', '.join(map(str, allowed))}", param=flag)
