"""The draw: uniform numbers by counter, and exact frequencies."""

import math

import numpy as np
import pytest
import torch

from warmroot.actors.runner.draw import draw, uniform
from warmroot.actors.runner.rows import SamplingRow
from warmroot.actors.runner.sampler import Sampler
from warmroot.cluster.sampling_params import SamplingParams

NUM_DRAWS = 20_000
LOGITS = torch.randn(50, generator=torch.Generator().manual_seed(5)) * 2


def row(params: SamplingParams, seed: int = 0, tokens=(1, 2, 3), num_prompt: int = 3) -> SamplingRow:
    return SamplingRow(params, seed, num_prompt, np.array(tokens, np.int32))


def sample(logits: torch.Tensor, rows: list[SamplingRow]) -> list[int]:
    return Sampler(()).sample(logits.clone(), rows).token_ids


def test_uniform_is_fixed_for_ever():
    # A request that moves to a replica of another version must draw on: these values may never change.
    assert uniform(0, 0) == 0.0564663990004608
    assert uniform(7, 3) == 0.1846062188940475
    assert uniform(-1, 0) == uniform(2**64 - 1, 0)


def test_uniforms_are_uniform_and_distinct():
    values = np.array([uniform(seed, index) for seed in range(100) for index in range(200)])
    assert len(set(values.tolist())) == len(values)
    assert values.min() >= 0.0 and values.max() < 1.0
    counts = np.histogram(values, 100, (0, 1))[0]
    assert chi_square(counts, np.full(100, 0.01)) < critical(99)
    assert abs(np.corrcoef(values[:-1], values[1:])[0, 1]) < 0.03


def chi_square(counts: np.ndarray, probabilities: np.ndarray) -> float:
    wanted = probabilities * counts.sum()
    return float(((counts - wanted) ** 2 / wanted).sum())


def critical(degrees: int) -> float:
    """Exceeded once in 10,000 times (Wilson and Hilferty, 1931)."""
    return degrees * (1 - 2 / (9 * degrees) + 3.719 * math.sqrt(2 / (9 * degrees))) ** 3


def filtered(params: SamplingParams) -> np.ndarray:
    """The distribution to draw from, written out slowly: min-p, then top-k, then top-p of the rest."""
    scaled = LOGITS.double().numpy() / params.temperature
    weights = np.exp(scaled - scaled.max())
    weights[weights < params.min_p] = 0.0
    order = np.argsort(-weights)
    if params.top_k > 0:
        weights[order[params.top_k :]] = 0.0
    total, running = weights.sum(), 0.0
    for token in order:
        if running >= params.top_p * total:
            weights[token] = 0.0
        running += weights[token]
    return weights / weights.sum()


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0.5},
        {"temperature": 3.0},
        {"top_k": 7},
        {"top_k": 1},
        {"top_p": 0.8},
        {"top_p": 0.999999},
        {"min_p": 0.05},
        {"top_k": 20, "top_p": 0.6},
        {"temperature": 1.7, "top_k": 30, "top_p": 0.9, "min_p": 0.02},
        {"top_p": 1e-9},
        {"min_p": 1.0},
    ],
    ids=str,
)
def test_frequencies(options):
    params = SamplingParams(**options)
    rows = [row(params, seed) for seed in range(NUM_DRAWS)]
    counts = np.bincount(sample(LOGITS.expand(NUM_DRAWS, -1), rows), minlength=50)
    probabilities = filtered(params)
    allowed = probabilities > 0
    assert counts[~allowed].sum() == 0
    common = probabilities * NUM_DRAWS >= 5
    rest = allowed & ~common
    counts = np.append(counts[common], counts[rest].sum())
    probabilities = np.append(probabilities[common], probabilities[rest].sum())
    if probabilities[-1] == 0:
        counts, probabilities = counts[:-1], probabilities[:-1]
    if len(counts) > 1:
        assert chi_square(counts, probabilities) < critical(len(counts) - 1)


@pytest.mark.parametrize("vocab", [1, 5, 255, 256, 257, 5000])
def test_inverse_cdf(vocab):
    """The draw is the running sum's first token above u, whatever the tiles."""
    generator = torch.Generator().manual_seed(vocab)
    weights = torch.rand(64, vocab, generator=generator)
    weights[torch.rand(64, vocab, generator=generator) < 0.5] = 0.0
    weights[:, 0] = 0.25
    uniforms = torch.rand(64, generator=generator, dtype=torch.float64)
    sums = weights.double().numpy().cumsum(1)
    wanted = [int(np.searchsorted(s, u * s[-1], side="right")) for s, u in zip(sums, uniforms.tolist(), strict=True)]
    assert draw(weights, uniforms).tolist() == wanted


@pytest.mark.parametrize("value", [0.0, 1.0 - 2.0**-53])
def test_never_a_token_without_weight(value):
    weights = torch.zeros(1, 1000)
    weights[0, 300:310] = 1e-8
    assert draw(weights, torch.tensor([value], dtype=torch.float64)).tolist() == [300 if value == 0.0 else 309]


def test_a_row_does_not_depend_on_its_batch():
    generator = torch.Generator().manual_seed(3)
    vocab, kinds = 1031, [{}, {"top_k": 40}, {"top_p": 0.9}, {"min_p": 0.1}, {"temperature": 0.0}, {"top_k": 900}]
    kinds += [{"top_k": 5, "top_p": 0.5}, {"repetition_penalty": 1.3}, {"temperature": 2.0, "top_p": 0.999}]
    logits = torch.randn(90, vocab, generator=generator) * 3
    rows = [row(SamplingParams(**kinds[index % len(kinds)]), seed=index) for index in range(90)]
    together = sample(logits, rows)
    assert together == [sample(logits[index : index + 1], rows[index : index + 1])[0] for index in range(90)]
    order = torch.randperm(90, generator=generator).tolist()
    assert sample(logits[order], [rows[index] for index in order]) == [together[index] for index in order]


def test_draws_follow_the_output_index():
    """The same seed and history length draw alike, so that a resumed request goes on as it would have."""
    params = SamplingParams()
    resumed = row(params, seed=9, tokens=range(10), num_prompt=4)
    other = row(params, seed=9, tokens=range(20, 30), num_prompt=4)
    assert sample(LOGITS[None], [resumed]) == sample(LOGITS[None], [other])
    drawn = {sample(LOGITS[None], [row(params, 9, range(4 + n), 4)])[0] for n in range(40)}
    assert len(drawn) > 5


def test_extreme_temperatures():
    cold, hot = SamplingParams(temperature=1e-6), SamplingParams(temperature=100.0)
    assert sample(LOGITS[None], [row(cold)]) == [int(LOGITS.argmax())]
    assert len(set(sample(LOGITS.expand(500, -1), [row(hot, seed) for seed in range(500)]))) == 50
    assert sample(LOGITS[None] * 1e30, [row(cold)]) == [int(LOGITS.argmax())]
