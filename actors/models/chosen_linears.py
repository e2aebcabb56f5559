"""Float16 linears for the kernels that this machine is fastest with."""

from dataclasses import dataclass

import torch

from ..kernels.linear import unpack
from ..kernels.tuning import ChoosingLinear, LinearChoice, choose_linears
from ..layers.linear import Linear, PackedHalfMethod
from .linears import Linears
from .packed_cache import cache_dir
from .packing import PackedLinears


@dataclass(frozen=True, slots=True)
class ChosenLinears:
    """The native linears, and FBGEMM's beside them for the numbers of rows where it wins. Implements ``Linears``."""

    packed: PackedLinears
    choice: LinearChoice

    @property
    def format(self) -> str:
        """See ``Linears.format``."""
        return self.packed.format

    @property
    def table(self) -> torch.Tensor:
        """See ``Linears.table``."""
        return self.packed.table

    def linear(self, name: str) -> Linear:
        """See ``Linears.linear``."""
        own = self.packed.linear(name)
        if ".experts." in name:  # most of a model's weights: two copies of them would be too many
            return own
        weight = torch.cat([unpack(part) for part in own.parts])
        biases = [part.bias for part in own.parts if part.bias is not None]
        return ChoosingLinear(
            own, PackedHalfMethod().prepare(weight, torch.cat(biases) if biases else None), self.choice
        )


def choose(packed: PackedLinears) -> Linears:
    """The linears of a float16 model after a measurement that the machine remembers."""
    shapes = [(sum(part.shape[0] for part in parts), parts[0].shape[1]) for parts in packed.parts.values()]
    choice = choose_linears(shapes, cache_dir() / "tuning")
    return packed if all(choice.own) else ChosenLinears(packed, choice)
