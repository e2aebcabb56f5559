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
        grid = _fit(weight, gram.diagonal(), size, settings)
        codes = _columns(weight[:, order], gram[order][:, order], groups[order], settings, grid)[0]
    else:
        codes, grid = _columns(weight[:, order], gram[order][:, order], groups, settings, None)
    back = order.argsort()
    return QuantisedLinear(codes[:, back], grid, groups if settings.order == "static" else groups[back])


def _columns(
    weight: torch.Tensor,
    gram: torch.Tensor,
    groups: torch.Tensor,
    settings: QuantizeSettings,
    fixed: Grid | None,
) -> tuple[torch.Tensor, Grid]:
    """Codes [out, in] and grid. Without a ``fixed`` one, a group's is fitted when its first column is reached."""
    weight = weight.clone()
    factor = _inverse_factor(gram, settings.damping)
    importance = gram.diagonal()
    num_outputs, num_inputs = weight.shape
    num_groups = int(groups.max()) + 1
    scales = torch.empty(num_outputs, num_groups) if fixed is None else fixed.scales
    zeros = torch.empty(num_outputs, num_groups) if fixed is None else fixed.zeros
    codes = torch.empty(num_outputs, num_inputs, dtype=torch.uint8)
    size = settings.group_of(num_inputs)
    members = groups.tolist()
    for begin in range(0, num_inputs, _BLOCK):
        end = min(begin + _BLOCK, num_inputs)
        errors = torch.empty(num_outputs, end - begin)
        for column in range(begin, end):
            group = members[column]
            if fixed is None and column % size == 0:
                # Columns of later blocks lack this block's errors so far.
                reach = min(column + size, num_inputs)
                ahead = weight[:, column:reach]
                if reach > end:
                    ahead = ahead.clone()
                    ahead[:, end - column :] -= errors[:, : column - begin] @ factor[begin:column, end:reach]
                part = _fit(ahead, importance[column:reach], size, settings)
                scales[:, group], zeros[:, group] = part.scales[:, 0], part.zeros[:, 0]
            scale, zero = scales[:, group], zeros[:, group]
            code = weight[:, column].div(scale).add_(zero).round_().clamp_(0, settings.max_code)
            codes[:, column] = code
            error = (weight[:, column] - (code - zero) * scale) / factor[column, column]
            weight[:, column:end].addr_(error, factor[column, column:end], alpha=-1)
            errors[:, column - begin] = error
        weight[:, end:] -= errors @ factor[begin:end, end:]
    return codes, Grid(scales, zeros, settings.max_code)


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
