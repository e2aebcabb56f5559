"""Native argmax and sampling against the torch path, for every instruction set of this machine."""

import pytest
import torch

from warmroot.actors.kernels.library import native, runnable
from warmroot.actors.kernels.sampling import Sampling
from warmroot.actors.runner.draw import draw
from warmroot.actors.runner.filters import Filters, thresholds

pytestmark = pytest.mark.skipif(native() is None, reason="no native kernels")
LIBRARIES = [(library, threads) for library in runnable() for threads in (1, 2)]
INF, NAN = float("inf"), float("nan")


@pytest.fixture(params=LIBRARIES, ids=lambda param: f"{param[0].name}-{param[1]}")
def kernels(request):
    library, threads = request.param
    before = library.num_threads
    library.set_num_threads(threads)
    yield Sampling(library)
    library.set_num_threads(before)


def noise(*shape: int, scale: float = 1.0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))) * scale


def uniforms(count: int) -> torch.Tensor:
    return torch.rand(count, generator=torch.Generator().manual_seed(count), dtype=torch.float64)


def sample(kernels, logits, uniform, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0) -> torch.Tensor:
    """One setting for all rows, or a list with one each."""
    columns = zip(
        (temperature, top_k, top_p, min_p), (torch.float32, torch.int32, torch.float32, torch.float32), strict=True
    )
    rows = [torch.as_tensor(value).to(dtype).expand(len(logits)).contiguous() for value, dtype in columns]
    return kernels.sample_top_k_top_p(logits, *rows, uniform)


def weights_of(logits, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0) -> torch.Tensor:
    """The torch path's filtered weights."""
    rows = len(logits)
    weights = (logits - logits.amax(1, keepdim=True)).div(temperature).exp()
    least = thresholds(weights, Filters([top_k] * rows, [top_p] * rows, [min_p] * rows))
    return weights.masked_fill(weights < least[:, None], 0.0)


def assert_same_draws(found: torch.Tensor, weights: torch.Tensor, uniform: torch.Tensor) -> None:
    """Equal to the torch path's but where the uniform number falls on the border of two tokens."""
    differs = (found != draw(weights, uniform)).nonzero().flatten()
    assert len(differs) <= 1 + len(found) // 50
    sums = weights[differs].double().cumsum(1)
    chosen = found[differs, None]
    target = uniform[differs, None] * sums[:, -1:]
    assert (weights[differs].gather(1, chosen) > 0).all()
    upper = sums.gather(1, chosen)
    lower = upper - weights[differs].gather(1, chosen)
    assert (lower - 1e-4 * sums[:, -1:] <= target).all() and (target <= upper + 1e-4 * sums[:, -1:]).all()


@pytest.mark.parametrize("vocab", [1, 2, 15, 16, 17, 255, 1024, 1025, 5000, 16384, 16400, 49152])
def test_argmax(kernels, vocab):
    for rows in (0, 1, 3, 33):
        logits = noise(rows, vocab)
        assert torch.equal(kernels.argmax(logits), logits.argmax(1))


def test_argmax_gives_the_first_of_equals(kernels):
    for vocab, places in ((40, (3, 39)), (3000, (17, 18, 2999)), (40000, (1500, 20000, 39999)), (40000, (39990,))):
        logits = -noise(1, vocab).abs()
        logits[0, list(places)] = 1.0
        assert kernels.argmax(logits).tolist() == [places[0]]
    assert kernels.argmax(torch.zeros(2, 50000)).tolist() == [0, 0]


def test_argmax_of_what_is_not_finite(kernels):
    logits = noise(6, 20000)
    logits[0, :] = -INF
    logits[1, :] = NAN
    logits[2, 19999] = NAN
    logits[3, 12345] = INF
    logits[4, :19000] = -INF
    logits[4, 19500] = 9.0
    assert kernels.argmax(logits).tolist() == [0, 0, 0, 12345, 19500, logits[5].argmax()]


def test_logits_may_be_a_strided_view(kernels):
    wide = torch.full((9, 2000), NAN)
    wide[:, 100:1131] = noise(9, 1031, scale=3.0)
    view = wide[:, 100:1131]
    assert torch.equal(kernels.argmax(view), view.argmax(1))
    uniform = uniforms(9)
    assert torch.equal(
        sample(kernels, view, uniform, top_p=0.9), sample(kernels, view.contiguous(), uniform, top_p=0.9)
    )
    assert torch.equal(kernels.argmax(view.T), view.T.argmax(1))


SETTINGS = [
    {},
    {"temperature": 0.3},
    {"temperature": 2.5},
    {"top_k": 1},
    {"top_k": 50},
    {"top_k": 50, "top_p": 0.9},
    {"top_k": 50, "top_p": 0.9, "min_p": 0.05},
    {"top_k": 900, "top_p": 0.7},
    {"top_k": 100_000},
    {"top_k": 100_000, "top_p": 0.5},
    {"top_p": 0.9},
    {"top_p": 0.999999},
    {"top_p": 1e-9},
    {"top_p": 0.8, "min_p": 0.01},
    {"min_p": 0.2},
    {"min_p": 1.0},
    {"temperature": 1.7, "top_k": 20, "top_p": 0.6},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("vocab", [1, 17, 257, 5000])
def test_same_tokens_as_torch(kernels, vocab, settings):
    logits, uniform = noise(120, vocab, scale=3.0), uniforms(120)
    assert_same_draws(sample(kernels, logits, uniform, **settings), weights_of(logits, **settings), uniform)


@pytest.mark.parametrize("scale", [0.01, 1.0, 12.0])
def test_same_tokens_as_torch_with_a_large_vocabulary(kernels, scale):
    logits, uniform = noise(12, 49152, scale=scale), uniforms(12)
    for settings in SETTINGS:
        assert_same_draws(sample(kernels, logits, uniform, **settings), weights_of(logits, **settings), uniform)


@pytest.mark.parametrize(
    "settings", [{"top_k": 7}, {"top_k": 75}, {"top_k": 33, "top_p": 0.6}, {"top_p": 0.7}, {"min_p": 0.3}]
)
def test_ties_with_the_last_kept_stay(kernels, settings):
    """Logits of few values: a fine comb of uniform numbers meets each token that may be drawn, and no other."""
    logits = (noise(1, 300) * 2).round() / 2
    kept = weights_of(logits, **settings)[0].nonzero().flatten()
    assert "top_p" in settings or len(kept) > settings.get("top_k", 0), "no tie at the last of these"
    comb = torch.linspace(0, 1 - 2**-53, 20_000, dtype=torch.float64)
    found = sample(kernels, logits.expand(len(comb), -1).contiguous(), comb, **settings)
    assert torch.equal(found.unique(), kept)


def test_top_k_when_the_best_lie_side_by_side(kernels):
    """The search looks at the maxima of groups of tokens: all of the best in few groups, in many orders."""
    for shape in (torch.arange(6000.0).flip(0), torch.arange(6000.0), torch.arange(6000.0) % 256):
        logits = (shape * 0.01)[None].expand(64, -1).contiguous()
        for settings in ({"top_k": 40}, {"top_k": 300, "top_p": 0.8}):
            uniform = uniforms(64)
            assert_same_draws(sample(kernels, logits, uniform, **settings), weights_of(logits, **settings), uniform)


@pytest.mark.parametrize("settings", [{}, {"top_k": 7}, {"top_k": 800}, {"top_p": 0.9999}, {"top_k": 7, "top_p": 0.9}])
@pytest.mark.parametrize("vocab", [20, 1000, 3001])
def test_never_a_masked_token(kernels, vocab, settings):
    logits = torch.full((5, vocab), -INF)
    logits[:, vocab // 2 : vocab // 2 + 3] = torch.tensor([1.0, 2.0, -60.0])
    allowed = {vocab // 2, vocab // 2 + 1, vocab // 2 + 2}
    uniform = torch.tensor([0.0, 1e-30, 0.5, 1 - 2**-53, 0.9])
    found = sample(kernels, logits, uniform.double(), **settings)
    assert set(found.tolist()) <= allowed
    assert found[0] == vocab // 2


def test_rows_that_cannot_be_drawn_give_token_0(kernels):
    logits = noise(4, 3000)
    logits[0] = NAN
    logits[1, 2999] = NAN
    logits[2] = -INF
    for settings in ({}, {"top_k": 3}, {"top_p": 0.5}):
        weights = weights_of(logits, **settings)
        found = sample(kernels, logits, torch.full((4,), 0.99, dtype=torch.float64), **settings)
        assert (
            found[:3].tolist() == [0, 0, 0] == draw(weights, torch.full((4,), 0.99, dtype=torch.float64))[:3].tolist()
        )
        assert found[3] > 0


def test_temperature_0_is_the_largest(kernels):
    logits = noise(8, 3000)
    temperature = [0.0, 1.0] * 4
    found = sample(kernels, logits, uniforms(8), temperature=temperature)
    assert torch.equal(found[::2], logits[::2].argmax(1))
    assert torch.equal(found[1::2], sample(kernels, logits[1::2], uniforms(8)[1::2]))


def test_temperatures_near_0_and_infinity(kernels):
    logits, uniform = noise(50, 2000), uniforms(50)
    for settings in ({}, {"top_k": 50}, {"top_p": 0.9}):
        assert torch.equal(sample(kernels, logits, uniform, temperature=1e-30, **settings), logits.argmax(1))
    flat = sample(kernels, logits, uniform, temperature=1e30)
    assert (flat - (uniform * 2000).long()).abs().max() <= 1
    assert sample(kernels, logits, uniform, temperature=1e38, top_k=50).min() >= 0


def test_a_row_does_not_depend_on_its_batch(kernels):
    rows = 60
    logits, uniform = noise(rows, 3001, scale=3.0), uniforms(rows)
    options = {
        "temperature": torch.linspace(0.0, 2.0, rows),
        "top_k": torch.tensor([0, 5, 50, 900, 5000] * 12),
        "top_p": torch.tensor([1.0, 0.9, 0.5, 0.99] * 15),
        "min_p": torch.tensor([0.0, 0.0, 0.1] * 20),
    }
    together = sample(kernels, logits, uniform, **options)
    for row in range(rows):
        one = slice(row, row + 1)
        alone = sample(kernels, logits[one], uniform[one], **{name: value[one] for name, value in options.items()})
        assert torch.equal(alone, together[one])


def test_shares(kernels):
    """Evenly spaced uniform numbers give each token its share."""
    logits = noise(1, 40, scale=1.5)
    expected = weights_of(logits, top_k=10)[0]
    expected = expected / expected.sum()
    comb = (torch.arange(20_000, dtype=torch.float64) + 0.5) / 20_000
    counts = sample(kernels, logits.expand(20_000, -1).contiguous(), comb, top_k=10).bincount(minlength=40)
    torch.testing.assert_close(counts / 20_000, expected, atol=1.01e-4, rtol=0)


def test_operators_agree_with_their_shapes():
    logits, one = noise(4, 100), torch.ones(4)
    arguments = (logits, one, one.int(), one, one, one.double() * 0.5)
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(torch.ops.warmroot.argmax.default, (logits,), test_utils=checks)
    torch.library.opcheck(torch.ops.warmroot.sample_top_k_top_p.default, arguments, test_utils=checks)
