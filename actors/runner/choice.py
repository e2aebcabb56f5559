"""The choice of one token per row of logits: by the native kernels on a CPU that has them, else by torch."""

from collections.abc import Sequence
from typing import Protocol

import torch

from ..kernels import sampling as _operators  # noqa: F401  (imported to register them)
from ..kernels.library import native
from .arrays import to_device
from .draw import draw, uniform
from .filters import Filters, thresholds
from .rows import SamplingRow


class Choice(Protocol):
    """Both choose the same tokens, but for rounding. Nothing waits for the device."""

    def likeliest(self, logits: torch.Tensor) -> torch.Tensor:
        """Token ids [R] of the largest logits [R, vocab]."""
        ...

    def choose(self, logits: torch.Tensor, rows: Sequence[SamplingRow]) -> torch.Tensor:
        """Token ids [R], greedy or drawn as each row asks for. May overwrite the logits [R, vocab] float32."""
        ...


def choice_for(device: torch.device) -> Choice:
    """The faster one."""
    return NativeChoice() if device.type == "cpu" and native() is not None else TorchChoice()


class NativeChoice:
    """By ``warmroot::argmax`` and ``warmroot::sample_top_k_top_p``."""

    def likeliest(self, logits: torch.Tensor) -> torch.Tensor:
        """See ``Choice.likeliest``."""
        return torch.ops.warmroot.argmax(logits)

    def choose(self, logits: torch.Tensor, rows: Sequence[SamplingRow]) -> torch.Tensor:
        """See ``Choice.choose``."""
        params = [row.params for row in rows]
        return torch.ops.warmroot.sample_top_k_top_p(
            logits,
            torch.tensor([p.temperature for p in params]),
            torch.tensor([max(p.top_k, 0) for p in params], dtype=torch.int32),
            torch.tensor([p.top_p for p in params]),
            torch.tensor([p.min_p for p in params]),
            torch.tensor([_uniform(row) for row in rows], dtype=torch.float64),
        )


class TorchChoice:
    """On any device."""

    def likeliest(self, logits: torch.Tensor) -> torch.Tensor:
        """See ``Choice.likeliest``."""
        return logits.argmax(1)

    def choose(self, logits: torch.Tensor, rows: Sequence[SamplingRow]) -> torch.Tensor:
        """See ``Choice.choose``."""
        drawn = [index for index, row in enumerate(rows) if not row.params.greedy]
        if len(drawn) == len(rows):
            return _draw(logits, rows)
        token_ids = logits.argmax(1)
        if drawn:
            index = to_device(drawn, torch.int64, logits.device)
            token_ids[index] = _draw(logits[index], [rows[index] for index in drawn])
        return token_ids


def _draw(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> torch.Tensor:
    """Token ids [R] drawn from logits [R, vocab], which are overwritten."""
    uniforms = to_device([_uniform(row) for row in rows], torch.float64, logits.device)
    return draw(draw_weights(logits, rows), uniforms)


def draw_weights(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> torch.Tensor:
    """What tokens weigh in a draw [R, vocab], 0 where a filter leaves one out. Logits [R, vocab] are overwritten."""
    params, device = [row.params for row in rows], logits.device
    temperature = to_device([p.temperature for p in params], torch.float32, device)
    # The best weighs 1 whatever the temperature, so nothing overflows.
    weights = logits.sub_(logits.amax(1, keepdim=True)).div_(temperature[:, None]).exp_()
    if any(p.top_k > 0 or p.top_p < 1.0 or p.min_p > 0.0 for p in params):
        filters = Filters([p.top_k for p in params], [p.top_p for p in params], [p.min_p for p in params])
        weights.masked_fill_(weights < thresholds(weights, filters)[:, None], 0.0)
    return weights


def _uniform(row: SamplingRow) -> float:
    """None is needed where the likeliest token is taken."""
    return 0.0 if row.params.greedy else uniform(row.seed, row.num_output)
