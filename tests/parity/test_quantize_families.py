"""Checkpoints that ``warmroot quantize`` writes, of every family: read by the engine, beside the model itself."""

import pytest
import torch

from warmroot.actors.models import loader
from warmroot.actors.models.loader import load_model
from warmroot.actors.models.spec import read_spec
from warmroot.actors.quantize.checkpoint import quantize
from warmroot.actors.quantize.folding import Folding
from warmroot.actors.quantize.layerwise import Layerwise
from warmroot.actors.quantize.settings import QuantizeSettings
from warmroot.actors.quantize.stream import CalibrationStream
from warmroot.cluster.errors import ConfigError

from .sparse_families import FAMILIES as SPARSE

CPU = torch.device("cpu")
PROMPT = [5, 9, 40, 7, 21, 33, 2, 60, 11, 12, 13]
EIGHT_BITS = QuantizeSettings(method="gptq", bits=8, group_size=32)
AWQ = QuantizeSettings(method="awq", group_size=-1)


@pytest.fixture(autouse=True)
def by_torch(monkeypatch):
    """The native kernels quantise what they multiply with; here only weights are to differ."""
    monkeypatch.setattr(loader, "_native_linears", lambda: False)


def samples():
    return torch.randint(4, 256, (6, 32), generator=torch.Generator().manual_seed(1)).tolist()


def difference(folder, reference, paged):
    """Of the logits, relative."""
    ours, theirs = (
        paged(model).step({0: PROMPT})[0] for model in (load_model(folder, dtype="float32", device=CPU), reference)
    )
    return float((ours - theirs).norm() / theirs.norm())


def test_eight_bits_are_nearly_the_model(family_folder, family_decoder, paged, tmp_path):
    quantize(family_folder, tmp_path / "out", EIGHT_BITS, samples())
    assert difference(tmp_path / "out", family_decoder, paged) < 0.1


@pytest.fixture
def packable_folder(family_folder):
    spec = read_spec(family_folder)
    if spec.num_kv_heads * spec.head_dim % 8:
        pytest.skip("outputs are packed by eight")
    return family_folder


def test_awq_in_four_bits(packable_folder, family_decoder, paged, tmp_path):
    quantize(packable_folder, tmp_path / "out", AWQ, samples())
    assert difference(tmp_path / "out", family_decoder, paged) < 0.9


def test_folded_scales_change_nothing(packable_folder):
    layerwise = Layerwise(packable_folder, AWQ)
    decoder = layerwise._decoder
    with torch.inference_mode():
        plain, folded = (CalibrationStream(decoder, samples()) for _ in range(2))
        for index in range(decoder.spec.num_layers):
            linears = layerwise._linears.under(f"model.layers.{index}.")
            for linear in linears:
                linear.load()
                linear.watch()
            plain.advance(index)
            folding = Folding(decoder, index, {linear.kind: linear for linear in linears})
            for linear in linears:
                folding.fold(linear.kind, linear.take_moments(), AWQ)
            folded.advance(index)
    for ours, theirs in zip(folded._hidden, plain._hidden, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2e-3, atol=2e-3 * float(theirs.abs().max()))


@pytest.fixture(params=["mixtral", "qwen2_moe", "qwen3_moe", "olmoe"])
def sparse_folder(request, tmp_path):
    SPARSE[request.param].build().save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def test_experts(sparse_folder, paged, tmp_path):
    quantize(sparse_folder, tmp_path / "out", EIGHT_BITS, samples())
    reference = load_model(sparse_folder, dtype="float32", device=CPU)
    # A router near a tie may choose another expert: it is a few tokens that may differ.
    assert difference(tmp_path / "out", reference, paged) < 0.3


def test_what_is_refused(tmp_path):
    SPARSE["deepseek_v2"].build().save_pretrained(tmp_path / "latent")
    with pytest.raises(ConfigError, match="deepseek_v2 has latent attention, which is not quantised"):
        Layerwise(tmp_path / "latent", EIGHT_BITS)
    SPARSE["mixtral"].build().save_pretrained(tmp_path / "sparse")
    with pytest.raises(ConfigError, match="awq is for dense models"):
        Layerwise(tmp_path / "sparse", AWQ)
