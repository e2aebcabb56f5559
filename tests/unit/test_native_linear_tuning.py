"""The choice between the own float16 kernels and FBGEMM's."""

import pytest
import torch

from warmroot.actors.kernels import tuning
from warmroot.actors.kernels.library import native
from warmroot.actors.kernels.linear import NativeLinear
from warmroot.actors.kernels.tuning import ChoosingLinear, ChoosingMethod, LinearChoice, choose_linears, measure
from warmroot.actors.layers.linear import PackedHalfLinear, PackedHalfMethod

pytestmark = pytest.mark.skipif(
    native() is None or not PackedHalfMethod.is_available(), reason="there is nothing to choose from"
)


@pytest.mark.parametrize(("rows", "index"), [(0, 0), (1, 0), (2, 1), (16, 1), (17, 2), (64, 2), (65, 3), (2048, 3)])
def test_classes_of_rows(rows, index):
    for wanted in range(4):
        own = tuple(position == wanted for position in range(4))
        assert LinearChoice(own).is_own(rows) == (index == wanted)


@pytest.mark.parametrize(("other", "own"), [(1.0, True), (0.92, True), (0.9, False), (0.5, False)])
def test_fbgemm_must_be_clearly_faster(other, own):
    def timer(linears, x):
        assert isinstance(linears[0], NativeLinear)
        return 1.0, 1.0 if x.shape[0] < 100 else other

    assert measure((32, 64), timer) == LinearChoice((True, True, True, own))


def test_only_what_is_used_is_packed():
    weight = torch.randn(32, 64)
    assert isinstance(ChoosingMethod(LinearChoice()).prepare(weight, None), NativeLinear)
    assert isinstance(ChoosingMethod(LinearChoice((False,) * 4)).prepare(weight, None), PackedHalfLinear)
    both = ChoosingMethod(LinearChoice((True, False, True, False))).prepare(weight, torch.ones(32))
    assert isinstance(both, ChoosingLinear)
    for rows in (1, 5, 20, 70):
        x = torch.randn(rows, 64)
        torch.testing.assert_close(both.apply(x), x @ weight.half().float().T + 1, rtol=1e-5, atol=1e-5)


def test_a_choice_is_remembered(tmp_path, monkeypatch):
    calls = []
    wanted = LinearChoice((True, True, False, True))

    def fake(shape, timer):
        calls.append(shape)
        return wanted

    monkeypatch.setattr(tuning, "measure", fake)
    shapes = [(576, 576), (49152, 576), (576, 1536)]
    for _ in range(2):
        assert choose_linears(shapes, tmp_path / "tuning") == wanted
    assert calls == [(3 * 2**22 // 576, 576)]
    choose_linears([(64, 64)], tmp_path / "tuning")
    assert calls[1:] == [(64, 64)]
    for file in (tmp_path / "tuning").iterdir():
        file.write_text("[]")
    choose_linears(shapes, tmp_path / "tuning")
    assert len(calls) == 3


def test_a_folder_that_cannot_be_written_is_no_failure(tmp_path):
    (tmp_path / "file").touch()
    assert isinstance(choose_linears([(64, 64)], tmp_path / "file" / "below"), LinearChoice)
