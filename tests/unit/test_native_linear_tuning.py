"""The choice between the own float16 kernels and FBGEMM's."""

import pytest
import torch

from warmroot.actors.attention.interface import AttentionMetadata
from warmroot.actors.attention.kv_memory import KvMemory
from warmroot.actors.kernels import tuning
from warmroot.actors.kernels.library import native
from warmroot.actors.kernels.linear import NativeLinear, NativeMethod, WeightFormat
from warmroot.actors.kernels.tuning import ChoosingLinear, LinearChoice, choose_linears, measure
from warmroot.actors.layers.linear import PackedHalfMethod
from warmroot.actors.models import chosen_linears
from warmroot.actors.models.loader import load_model
from warmroot.actors.models.source import resolve_model
from warmroot.cluster.kv_layout import KvLayout

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


def test_each_class_of_rows_goes_to_its_kernel():
    weight = torch.randn(32, 64)
    own = NativeMethod(WeightFormat.F16).prepare(weight, torch.ones(32))
    both = ChoosingLinear(own, PackedHalfMethod().prepare(weight, torch.ones(32)), LinearChoice((True, False) * 2))
    for rows in (1, 5, 20, 70):
        x = torch.randn(rows, 64)
        torch.testing.assert_close(both.apply(x), x @ weight.half().float().T + 1, rtol=1e-5, atol=1e-5)


@pytest.mark.model
def test_a_decoder_takes_the_fused_step_only_where_the_own_kernels_win(monkeypatch):
    monkeypatch.setattr(
        chosen_linears, "choose_linears", lambda shapes, folder: LinearChoice((True, True, False, True))
    )
    decoder = load_model(resolve_model("smollm2"), dtype="float16", device=torch.device("cpu"))
    assert isinstance(decoder.layers[0].mlp.down, ChoosingLinear)
    kv = KvMemory.allocate(
        KvLayout.of(decoder.spec.layer_windows, 16), 8, 3, 64, torch.float32, torch.device("cpu"), decoder.backend
    )
    token_ids = torch.arange(1000, 1030)
    whole = decoder.logits(decoder.forward(token_ids, torch.arange(30), kv, (_prompt(0, 30),)))
    first = decoder.logits(decoder.forward(token_ids[:15], torch.arange(15), kv, (_prompt(0, 15),)))
    rest = decoder.logits(decoder.forward(token_ids[15:], torch.arange(15, 30), kv, (_prompt(15, 15),)))
    torch.testing.assert_close(torch.cat((first, rest)), whole, rtol=1e-3, atol=2e-3)


def _prompt(start, length):
    return AttentionMetadata(
        torch.tensor([0, length], dtype=torch.int32),
        torch.tensor([start + length], dtype=torch.int32),
        torch.tensor([[1, 2]], dtype=torch.int32),
        torch.arange(16 + start, 16 + start + length),
        length,
        start + length,
    )


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
