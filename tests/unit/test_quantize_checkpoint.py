"""``warmroot quantize`` on a small model: what is written, read by the formats' definitions."""

import json

import pytest
import quantize_harness as harness
import torch
from gguf_models import Storage
from gguf_models import write_model as write_gguf

from warmroot.actors.attention.interface import AttentionMetadata
from warmroot.actors.attention.kv_memory import KvMemory
from warmroot.actors.models.loader import load_model
from warmroot.actors.models.source import resolve_model
from warmroot.actors.models.spec import read_spec
from warmroot.actors.quantize.calibration import calibration_samples
from warmroot.actors.quantize.checkpoint import quantize
from warmroot.actors.quantize.folding import Folding
from warmroot.actors.quantize.layerwise import Layerwise
from warmroot.actors.quantize.settings import QuantizeSettings
from warmroot.actors.quantize.stream import CalibrationStream
from warmroot.cluster.errors import ConfigError, ModelLoadError
from warmroot.cluster.kv_layout import KvLayout
from warmroot.cluster.model_config import spec_from_hf
from warmroot.cluster.model_config_export import config_from_spec
from warmroot.deploy.cli import main
from warmroot.router.tokenizer import Tokenizer

METHODS = {
    "rtn": {"method": "rtn", "group_size": 32},
    "gptq": {"method": "gptq", "group_size": 32},
    "gptq-act-order": {"method": "gptq", "group_size": 32, "act_order": "dynamic"},
    "gptq-8bit": {"method": "gptq", "group_size": -1, "bits": 8},
    "gptq-128-short-group": {"method": "gptq", "group_size": 128},
    "gptq-symmetric": {"method": "gptq", "group_size": 32, "symmetric": True},
    "awq": {"method": "awq", "group_size": 32},
    "awq-rows": {"method": "awq", "group_size": -1},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return harness.write_model(tmp_path_factory.mktemp("model"), bias=True)


def logits(folder):
    """Of one text, by the model in float32."""
    decoder = load_model(folder, dtype="float32", quantization="none", device=torch.device("cpu"))
    token_ids = torch.tensor(harness.samples(1, 64)[0])
    layout = KvLayout.of(decoder.spec.layer_windows, 16)
    kv = KvMemory.allocate(
        layout, 5, decoder.spec.cache_heads, decoder.spec.cache_dim, decoder.dtype, decoder.device, decoder.backend
    )
    metadata = AttentionMetadata(
        torch.tensor([0, 64], dtype=torch.int32),
        torch.tensor([64], dtype=torch.int32),
        torch.arange(1, 5, dtype=torch.int32)[None],
        torch.arange(16, 80),
        64,
        64,
    )
    return decoder.logits(decoder.forward(token_ids, torch.arange(64), kv, (metadata,)))


def divergence(ours, reference):
    reference = reference.log_softmax(-1)
    return float((reference.exp() * (reference - ours.log_softmax(-1))).sum(-1).mean())


@pytest.mark.parametrize("name", METHODS)
def test_a_checkpoint_says_what_was_found(model, tmp_path, name):
    settings = QuantizeSettings(**METHODS[name])
    found = {}
    written = quantize(
        model, tmp_path / "out", settings, harness.samples(), on_layer=lambda layer: found.update(layer.linears)
    )
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["quantization_config"] == settings.config()
    assert config["dtype"] == "float16" and "torch_dtype" not in config
    assert config["hidden_size"] == harness.HIDDEN
    tensors = harness.read_tensors(tmp_path / "out")
    source = harness.read_tensors(model)
    modules = {f"model.layers.{layer}.{module}" for layer in range(harness.LAYERS) for module in harness.SHAPES}
    assert set(found) == modules
    parts = {"qweight", "qzeros", "scales"} | ({"g_idx"} if settings.method != "awq" else set())
    expected = {name for name in source if name.removesuffix(".weight") not in modules}
    assert set(tensors) == expected | {f"{module}.{part}" for module in modules for part in parts}
    for module in ("model.layers.0.self_attn.v_proj", "model.layers.1.mlp.down_proj"):
        if settings.method == "awq":
            size = settings.group_of(source[module + ".weight"].shape[1])
            weight = harness.awq_weight(tensors, module, size)
        else:
            weight = harness.gptq_weight(tensors, module, settings.bits)
        torch.testing.assert_close(weight, found[module].weight(), atol=1e-6, rtol=0)
    for tensor in expected if settings.method != "awq" else ("model.embed_tokens.weight", "model.norm.weight"):
        assert torch.equal(tensors[tensor], source[tensor].half()), tensor
    assert written.total_bytes == sum(tensor.nbytes for tensor in tensors.values())
    linears = [tensor for name, tensor in tensors.items() if name.rpartition(".")[0] in modules]
    biases = 2 * sum(source[f"{module}.bias"].numel() for module in modules)
    assert written.quantised_bytes == sum(tensor.nbytes for tensor in linears) - biases
    assert written.quantised_float_bytes == 2 * sum(source[f"{module}.weight"].numel() for module in modules)


@pytest.fixture(scope="module")
def rounded(model, tmp_path_factory):
    """How far plain rounding is from the model."""
    return distance(model, "rtn", tmp_path_factory.mktemp("rounded"))


def distance(model, name, folder):
    quantize(model, folder / "out", QuantizeSettings(**METHODS[name]), harness.samples())
    return divergence(logits(harness.dequantised(folder / "out", folder / "plain")), logits(model))


@pytest.mark.parametrize(("name", "share"), [("gptq-8bit", 0.01), ("gptq", 0.8), ("gptq-act-order", 0.8), ("awq", 0.9)])
def test_a_checkpoint_is_nearer_to_the_model_than_rounding(model, tmp_path, rounded, name, share):
    assert distance(model, name, tmp_path) < share * rounded


@pytest.mark.parametrize("bias", [False, True])
def test_folded_scales_change_nothing(tmp_path, bias):
    """AWQ before it rounds: columns times s, and what makes the inputs divided by s."""
    folder = harness.write_model(tmp_path / "model", bias=bias)
    layerwise = Layerwise(folder, QuantizeSettings(method="awq", group_size=32))
    decoder, linears = layerwise._decoder, layerwise._linears.under("model.layers.0.")
    with torch.inference_mode():
        for linear in linears:
            linear.load()
            linear.watch()
        plain, folded = (CalibrationStream(decoder, harness.samples(2)) for _ in range(2))
        plain.advance(0)
        folding = Folding(decoder, 0, {linear.kind: linear for linear in linears})
        scales = [
            folding.fold(linear.kind, linear.take_moments(), QuantizeSettings(method="awq", group_size=32))
            for linear in linears
        ]
        folded.advance(0)
    assert all(scale.max() > 1.2 * scale.min() for scale in scales)
    for ours, theirs in zip(folded._hidden, plain._hidden, strict=True):
        torch.testing.assert_close(ours, theirs, atol=2e-4, rtol=2e-4)
    biases = {f"model.layers.0.{name}.bias" for name in ("self_attn.v_proj", "mlp.up_proj")} if bias else set()
    norms = {f"model.layers.0.{name}.weight" for name in ("input_layernorm", "post_attention_layernorm")}
    assert set(folding.floats()) == biases | norms


def test_later_layers_see_what_earlier_ones_lost(model):
    layerwise = Layerwise(model, QuantizeSettings(method="gptq", group_size=32))
    with torch.inference_mode():
        layers = layerwise.run(harness.samples())
        first = next(layers)
        # The layer that has just been done computes with what was found, until the next one is asked for.
        linear = layerwise._linears.under("model.layers.0.mlp.down_proj")[0]
        assert torch.equal(linear.weight, first.linears["model.layers.0.mlp.down_proj"].weight())
        next(layers)
        assert linear.weight.numel() == 0


def test_a_quantised_model_is_not_quantised_again(model, tmp_path):
    settings = QuantizeSettings(**METHODS["rtn"])
    quantize(model, tmp_path / "out", settings)
    with pytest.raises(ConfigError, match=r"is quantised already \(gptq-int4-g32\); give its original"):
        quantize(tmp_path / "out", tmp_path / "again", settings)


def test_large_checkpoints_come_in_shards(model, tmp_path):
    quantize(model, tmp_path / "out", QuantizeSettings(**METHODS["rtn"]), shard_bytes=20_000)
    files = sorted(path.name for path in (tmp_path / "out").glob("*.safetensors"))
    assert len(files) > 2 and files[0] == f"model-00001-of-{len(files):05}.safetensors"
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    tensors = harness.read_tensors(tmp_path / "out")
    assert set(index["weight_map"]) == set(tensors)
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in tensors.values())


def test_a_gguf_model_becomes_a_whole_folder(tmp_path):
    source = write_gguf(tmp_path / "model.gguf", {"": Storage.Q8_0})
    settings = QuantizeSettings(method="gptq", group_size=64, bits=8)
    layerwise = Layerwise(source, settings)
    config = config_from_spec(layerwise.spec)
    assert spec_from_hf(config) == read_spec(source)
    with pytest.raises(ModelLoadError, match="tokenizer"):
        quantize(source, tmp_path / "out", settings, harness.samples(4))
    assert not (tmp_path / "out" / "config.json").exists()


@pytest.mark.model
def test_the_packaged_model_keeps_its_tokenizer(tmp_path):
    path = resolve_model("smollm2")
    config = config_from_spec(read_spec(path))
    assert spec_from_hf(config) == read_spec(path)
    from warmroot.actors.quantize.checkpoint import write_tokenizer

    write_tokenizer(path, tmp_path)
    ours, theirs = Tokenizer.from_path(tmp_path), Tokenizer.from_path(path)
    text = "<|im_start|>user\nNaïve café: 12,345 — 'x'?\n<|im_end|>"
    assert ours.encode(text) == theirs.encode(text)
    assert ours.chat_template == theirs.chat_template and ours.special_tokens == theirs.special_tokens


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--group-size", "48"], "--group-size: 48 is not one of -1, 32, 64, 128"),
        (["--method", "awq", "--group-size", "64"], "has 160 inputs, which AWQ's layout cannot cut into groups of 64"),
        (["--calibration", "none.txt"], "--calibration: none.txt: "),
        (["--samples", "0"], "--samples: should be at least 1, not 0"),
        (["--method", "rtn", "--act-order"], "--act-order: not with --method rtn"),
        (["--method", "gptq", "--act-order", "often"], "'often' is not one of none, static, dynamic"),
    ],
)
def test_what_cannot_be_done_is_said(model, tmp_path, capsys, flags, message):
    harness.write_tokenizer(model)
    assert main(["quantize", str(model), "--output", str(tmp_path / "out"), *flags]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_the_command_writes_a_checkpoint(model, tmp_path, capsys):
    harness.write_tokenizer(model)
    text = tmp_path / "text.txt"
    text.write_text("The quick brown fox jumps over the lazy dog. " * 20)
    flags = ["--group-size", "32", "--calibration", str(text), "--samples", "4", "--length", "32", "--threads", "1"]
    assert main(["quantize", str(model), "--output", str(tmp_path / "out"), *flags]) == 0
    output = capsys.readouterr()
    assert output.out == f"{tmp_path / 'out'}\n"
    assert "layer 1 of 2  qkv_proj " in output.err and "quantised layers have 0." in output.err
    assert (tmp_path / "out" / "tokenizer.json").is_file()
    assert main(["quantize", str(model), "--output", str(tmp_path / "out"), *flags]) == 2
    assert "exists and is not an empty folder" in capsys.readouterr().err


def test_calibration_text():
    built_in = calibration_samples(lambda text: text.split(), "builtin", num_samples=5, length=40)
    assert len(built_in) == 5 and all(len(sample) == 40 for sample in built_in)
    assert built_in == calibration_samples(lambda text: text.split(), "builtin", num_samples=5, length=40)
    assert len({tuple(sample) for sample in built_in}) == 5


def test_calibration_text_that_is_too_short(tmp_path):
    path = tmp_path / "text"
    path.write_text("word " * 100)
    with pytest.raises(ConfigError, match="has 100 tokens, which is 3 samples of 32; give more text"):
        calibration_samples(lambda text: text.split(), str(path), num_samples=4, length=32)
