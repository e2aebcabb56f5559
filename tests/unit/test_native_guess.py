"""A recurrent head's pass in one native call against torch, for every instruction set of this machine."""

import pytest
import torch
import torch.nn.functional as F

from warmroot.actors.kernels.guessing import GuessingHead
from warmroot.actors.kernels.library import native, runnable
from warmroot.actors.kernels.linear import NativeMethod, WeightFormat

pytestmark = pytest.mark.skipif(native() is None, reason="no native kernels")


def noise(*shape: int, scale: float = 1.0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))) * scale


def expected(up: torch.Tensor, down: torch.Tensor, output: torch.Tensor, state: torch.Tensor, came: torch.Tensor):
    """(the state, log-probabilities of all tokens), by the formula in float64."""
    state, came, size = state.double(), came.double(), state.shape[1:]
    eps = torch.finfo(torch.float32).eps
    read = torch.cat((F.rms_norm(state, size, eps=eps), F.rms_norm(came, size, eps=eps)), 1)
    state = state + F.silu(read @ up.double().T) @ down.double().T
    return state, (state @ output.double().T).log_softmax(1)


@pytest.mark.parametrize("library", runnable(), ids=lambda library: library.name)
@pytest.mark.parametrize("size, inner, tokens", [(64, 96, 50), (33, 21, 7), (576, 1536, 8192)])
@pytest.mark.parametrize("rows", [1, 3, 20])
def test_as_the_formula_says(library, size, inner, tokens, rows):
    up, down = noise(inner, 2 * size, scale=size**-0.5), noise(size, inner, scale=inner**-0.5)
    output = noise(tokens, size, scale=size**-0.5)
    method = NativeMethod(WeightFormat.F32)
    head = GuessingHead(library, *(method.prepare(weight, None) for weight in (up, down, output)))
    state, came = noise(rows, size), noise(rows, size, scale=0.1)
    advanced, logprobs = expected(up, down, output, state, came)
    for count in (1, 3, 10):
        found, places, found_logprobs = head(state, came, count)
        torch.testing.assert_close(found.double(), advanced, rtol=1e-5, atol=1e-5)
        values, wanted = logprobs.topk(min(count, tokens))
        assert torch.equal(places, wanted)
        torch.testing.assert_close(found_logprobs.double(), values, rtol=1e-5, atol=1e-5)


def test_what_it_reads_stays_as_it_is_and_equal_logits_come_in_their_order():
    method = NativeMethod(WeightFormat.F32)
    weights = (torch.zeros(8, 8), torch.zeros(4, 8), torch.zeros(40, 4))
    head = GuessingHead(runnable()[0], *(method.prepare(weight, None) for weight in weights))
    state = noise(4, 2).T  # rows that lie apart
    before = state.clone()
    advanced, places, logprobs = head(state, torch.zeros(2, 4), 99)
    assert torch.equal(state, before) and torch.equal(advanced, before)
    assert places.tolist() == [list(range(32))] * 2
    torch.testing.assert_close(logprobs, torch.full((2, 32), 1 / 40).log())
