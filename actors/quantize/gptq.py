"""GPTQ (Frantar et al., arXiv 2210.17323): columns are rounded one by one, and what each loses the later ones make up.

The second moments of the inputs are the Hessian of the output's squared error. With its inverse's Cholesky factor U,
an error e of column i is taken from the columns behind it in the shares U[i, i+1:] / U[i, i].
"""

import torch

from .grid import Grid, fit, grouped
from .quantised import QuantisedLinear
from .settings import QuantizeSettings

_BLOCK = 128
"""Columns whose errors reach the rest of the matrix in one multiplication."""


def gptq(weight: torch.Tensor, gram: torch.Tensor, settings: QuantizeSettings) -> QuantisedLinear:
    """Quantise a weight [out, in] for inputs with second moments ``gram`` [in, in]."""
    num_inputs = weight.shape[1]
    size = settings.group_of(num_inputs)
    order = torch.arange(num_inputs)
    if settings.order != "none":
        order = gram.diagonal().argsort(descending=True, stable=True)
    groups = torch.arange(num_inputs) // size
    if settings.order == "static":
        fixed = _fit(weight, gram.diagonal(), size, settings)
        members = groups[order]
    else:
        fixed, members = None, groups
    columns = _Columns(weight[:, order], gram[order][:, order], members, settings, fixed)
    columns.round()
    back = order.argsort()
    return QuantisedLinear(columns.codes[:, back], columns.grid, members[back])


class _Columns:
    """A weight [out, in] whose columns are rounded from left to right; column i is in group ``groups[i]``.

    Without a ``fixed`` grid groups are neighbours, and each is fitted when its first column is reached.
    """

    def __init__(
        self,
        weight: torch.Tensor,
        gram: torch.Tensor,
        groups: torch.Tensor,
        settings: QuantizeSettings,
        fixed: Grid | None,
    ) -> None:
        self._weight = weight.clone()
        self._factor = _inverse_factor(gram, settings.damping)
        self._importance = gram.diagonal()
        self._groups = groups.tolist()
        self._settings = settings
        self._is_fixed = fixed is not None
        scales, zeros = torch.empty(2, len(weight), max(self._groups) + 1).unbind()
        self.grid = fixed or Grid(scales, zeros, settings.max_code)
        self.codes = torch.empty(weight.shape, dtype=torch.uint8)

    def round(self) -> None:
        """Fill ``codes``, and ``grid`` if it is not fixed."""
        num_inputs = self._weight.shape[1]
        for begin in range(0, num_inputs, _BLOCK):
            end = min(begin + _BLOCK, num_inputs)
            errors = self._round_block(begin, end)
            self._weight[:, end:] -= errors @ self._factor[begin:end, end:]

    def _round_block(self, begin: int, end: int) -> torch.Tensor:
        """Errors [out, columns] of a block, over the diagonal of the factor; columns behind it do not have them yet."""
        weight, factor = self._weight, self._factor
        errors = torch.empty(len(weight), end - begin)
        for column in range(begin, end):
            group = self._groups[column]
            if not self._is_fixed and (column == 0 or group != self._groups[column - 1]):
                self._fit_group(group, column, end, errors[:, : column - begin])
            scale, zero = self.grid.scales[:, group], self.grid.zeros[:, group]
            code = weight[:, column].div(scale).add_(zero).round_().clamp_(0, self.grid.max_code)
            error = (weight[:, column] - (code - zero) * scale) / factor[column, column]
            weight[:, column:end].addr_(error, factor[column, column:end], alpha=-1)
            self.codes[:, column] = code
            errors[:, column - begin] = error
        return errors

    def _fit_group(self, group: int, first: int, end: int, errors: torch.Tensor) -> None:
        """From its ``first`` column on; those behind the block's ``end`` lack the block's ``errors`` so far."""
        size = self._settings.group_of(self._weight.shape[1])
        members = self._weight[:, first : first + size].clone()
        behind = self._factor[first - errors.shape[1] : first, end : first + size]
        if behind.numel():
            members[:, end - first :] -= errors @ behind
        fitted = _fit(members, self._importance[first : first + size], size, self._settings)
        self.grid.scales[:, group], self.grid.zeros[:, group] = fitted.scales[:, 0], fitted.zeros[:, 0]


def _fit(weight: torch.Tensor, importance: torch.Tensor, size: int, settings: QuantizeSettings) -> Grid:
    return fit(
        grouped(weight, size),
        settings.max_code,
        symmetric=settings.symmetric,
        importance=grouped(importance[None], size)[0],
    )


def _inverse_factor(gram: torch.Tensor, damping: float) -> torch.Tensor:
    """Upper Cholesky factor of the damped matrix's inverse. Inputs that never were anything but zero stand alone."""
    damped = gram.clone()
    diagonal = damped.diagonal()
    diagonal += damping * diagonal.mean()
    diagonal[diagonal == 0.0] = 1.0
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(damped.double()))
    return torch.linalg.cholesky(inverse, upper=True).float()
