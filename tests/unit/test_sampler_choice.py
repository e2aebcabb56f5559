"""Native and torch choose the same tokens."""

import random

import numpy as np
import pytest
import torch

from warmroot.actors.kernels.library import native
from warmroot.actors.runner.choice import Choice, NativeChoice, TorchChoice, choice_for
from warmroot.actors.runner.rows import SamplingRow
from warmroot.actors.runner.sampler import Sampler
from warmroot.cluster.sampling_params import SamplingParams

CHOICES = [
    TorchChoice(),
    pytest.param(NativeChoice(), marks=pytest.mark.skipif(native() is None, reason="no native kernels")),
]


def row(seed: int, num_output: int = 0, **params) -> SamplingRow:
    return SamplingRow(SamplingParams(**params), seed, 2, np.arange(2 + num_output, dtype=np.int32))


def random_rows(count: int) -> list[SamplingRow]:
    generator = random.Random(count)
    return [
        row(
            generator.randrange(1000),
            generator.randrange(50),
            temperature=generator.choice([0.0, 0.3, 1.0, 1.7]),
            top_k=generator.choice([-1, 0, 1, 20, 300]),
            top_p=generator.choice([1.0, 0.95, 0.5]),
            min_p=generator.choice([0.0, 0.0, 0.1]),
        )
        for _ in range(count)
    ]


@pytest.mark.skipif(native() is None, reason="no native kernels")
@pytest.mark.parametrize("vocab", [50, 4096, 49_152])
def test_native_draws_what_torch_draws(vocab):
    rows = random_rows(300 if vocab < 10_000 else 60)
    logits = torch.randn(len(rows), vocab, generator=torch.Generator().manual_seed(vocab)) * 3
    found = NativeChoice().choose(logits.clone(), rows)
    expected = TorchChoice().choose(logits.clone(), rows)
    # Where a draw falls within rounding of the border of two tokens they may differ.
    assert (found == expected).double().mean() > 0.99
    assert torch.equal(NativeChoice().likeliest(logits), logits.argmax(1))


@pytest.mark.parametrize("choice", CHOICES)
def test_a_row_is_chosen_as_if_alone(choice: Choice):
    rows = random_rows(40)
    logits = torch.randn(len(rows), 5000, generator=torch.Generator().manual_seed(1)) * 2
    together = choice.choose(logits.clone(), rows).tolist()
    assert together == [int(choice.choose(logits[i : i + 1].clone(), rows[i : i + 1])) for i in range(len(rows))]


@pytest.mark.parametrize("choice", CHOICES)
def test_a_masked_row_does_not_end_the_others(choice: Choice):
    logits = torch.zeros(3, 600)
    logits[1] = -torch.inf
    logits[2, 17] = 50.0
    chosen = choice.choose(logits, [row(1), row(2), row(3)]).tolist()
    assert chosen[1:] == [0, 17]


def test_the_sampler_takes_the_one_for_its_device(monkeypatch):
    assert isinstance(choice_for(torch.device("meta")), TorchChoice)
    monkeypatch.setattr("warmroot.actors.runner.choice.native", lambda: None)
    assert isinstance(choice_for(torch.device("cpu")), TorchChoice)
    logits = torch.eye(4, 9) * 5
    plain, drawn = row(0, temperature=0.0), row(0, temperature=1.0, top_k=1)
    assert Sampler(()).sample(logits, [plain, drawn, plain, drawn]).token_ids == [0, 1, 2, 3]
