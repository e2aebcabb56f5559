"""A decoder whose linears are read when their layer's turn comes, watch their inputs, and can be replaced."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from ...cluster.parallel_layout import RankLayout
from ..layers.linear import Linear
from ..models.linears import take_table
from ..models.tensors import fused_linears
from ..models.weights import Weights
from .awq import InputMoments


class Moments:
    """Adds up what a linear is given."""

    def __init__(self, num_inputs: int) -> None:
        self._gram = torch.zeros(num_inputs, num_inputs)
        self._size = torch.zeros(num_inputs)
        self._rows = 0

    def add(self, x: torch.Tensor) -> None:
        """Inputs [T, in]."""
        x = x.float()
        self._gram.addmm_(x.t(), x)
        self._size += x.abs().sum(0)
        self._rows += len(x)

    def mean(self) -> InputMoments:
        """Zeros where nothing was added, as for an expert that no token chose."""
        rows = max(1, self._rows)
        return InputMoments(self._gram / rows, self._size / rows)


class WatchedLinear:
    """A linear, of one or several modules that share their input. It has no weight before ``load``."""

    def __init__(self, name: str, modules: Sequence[str], weights: Weights) -> None:
        self.name = name
        self.modules = modules
        self.weight = torch.empty(0)
        """[out, in] float32."""
        self.bias: torch.Tensor | None = None
        self.moments: Moments | None = None
        """Watches, if there is one."""
        self.is_silent = False
        """Gives zeros: nothing that it feeds is looked at."""
        self._weights = weights
        self._shapes = [weights.shape(module + ".weight") for module in modules]

    @property
    def kind(self) -> str:
        """What it is in its layer, such as ``qkv_proj``."""
        return self.name.rpartition(".")[2]

    @property
    def sizes(self) -> list[int]:
        """Outputs of each module."""
        return [shape[0] for shape in self._shapes]

    @property
    def in_features(self) -> int:
        """Inputs."""
        return self._shapes[0][1]

    def load(self) -> None:
        """Read the weights."""
        self.weight = torch.cat([self._weights.take(module + ".weight").float() for module in self.modules])
        biases = [self._weights.take_optional(module + ".bias") for module in self.modules]
        found = [bias.float() for bias in biases if bias is not None]
        self.bias = torch.cat(found) if found else None

    def unload(self) -> None:
        """Forget them."""
        self.weight, self.bias, self.moments = torch.empty(0), None, None

    def watch(self) -> None:
        """Begin to add up inputs."""
        self.moments = Moments(self.in_features)

    def take_moments(self) -> InputMoments:
        """What it has seen since ``watch``."""
        assert self.moments is not None
        moments, self.moments = self.moments.mean(), None
        return moments

    def apply(self, x: torch.Tensor) -> torch.Tensor:
        """See ``Linear.apply``."""
        if self.moments is not None:
            self.moments.add(x)
        if self.is_silent:
            return x.new_zeros(len(x), sum(self.sizes))
        return F.linear(x, self.weight, self.bias)


class WatchedLinears:
    """All linears of a decoder by name. Implements ``Linears``."""

    def __init__(self, own: RankLayout, weights: Weights) -> None:
        self._linears = {name: WatchedLinear(name, modules, weights) for name, modules in fused_linears(own).items()}
        self.table = take_table(weights, own)

    @property
    def format(self) -> str:
        """See ``Linears.format``."""
        return "float32"

    def linear(self, name: str) -> Linear:
        """See ``Linears.linear``."""
        return self._linears[name]

    def under(self, prefix: str) -> list[WatchedLinear]:
        """Those whose names begin so, such as a layer's."""
        return [linear for name, linear in self._linears.items() if name.startswith(prefix)]
