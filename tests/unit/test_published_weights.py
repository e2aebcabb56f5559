"""GPTQ and AWQ checkpoints: their values to the bit, whole and in the parts of ranks, by the kernels and by torch."""

from dataclasses import replace

import pytest
import torch
from published_models import LLAMA, awq, gptq, write_folder
from safetensors.torch import load_file, save_file

from warmroot.actors.kernels.library import native
from warmroot.actors.kernels.linear import Offsets, PackedWeight, unpack
from warmroot.actors.layers.grouped import GroupedLinear
from warmroot.actors.layers.linear import DenseLinear
from warmroot.actors.models import loader
from warmroot.actors.models.loader import load_model
from warmroot.actors.models.safetensors_source import SafetensorsSource
from warmroot.actors.models.spec import read_quantization, read_spec, unit_format
from warmroot.actors.models.tensors import fused_linears, slices, wanted_parts, wanted_shapes, whole_model
from warmroot.actors.models.weights import Weights
from warmroot.actors.parallel.shard import Shard
from warmroot.cluster.errors import ConfigError, ModelLoadError
from warmroot.cluster.model_config import spec_from_hf
from warmroot.cluster.parallel_layout import ParallelLayout
from warmroot.cluster.topology import Topology
from warmroot.cluster.weight_formats import KeptWeights

CPU = torch.device("cpu")
LAYOUTS = {
    "gptq": gptq(),
    "gptq v2": gptq(checkpoint_format="gptq_v2"),
    "gptq symmetric": gptq(sym=True),
    "gptq act-order": gptq(desc_act=True, group_size=64),
    "gptq act-order symmetric": gptq(desc_act=True, group_size=128, sym=True),
    "gptq g32": gptq(group_size=32),
    "gptq whole rows": gptq(group_size=-1),
    "gptq 8 bits": gptq(bits=8),
    "gptq 8 bits v2 act-order": gptq(bits=8, group_size=32, desc_act=True, checkpoint_format="gptq_v2"),
    "gptq 8 bits symmetric": gptq(bits=8, sym=True, group_size=-1),
    "awq": awq(),
    "awq g128": awq(group_size=128),
    "awq whole rows": awq(group_size=-1),
}
needs_kernels = pytest.mark.skipif(native() is None, reason="no native kernels here")


@pytest.fixture(scope="module", params=LAYOUTS)
def layout(request):
    return request.param


@pytest.fixture(scope="module")
def checkpoint(layout, tmp_path_factory):
    """(folder, values by name)"""
    folder = tmp_path_factory.mktemp("published") / "model"
    return folder, write_folder(folder, LAYOUTS[layout])


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("WARMROOT_CACHE_DIR", str(tmp_path / "cache"))


def open_source(folder):
    return SafetensorsSource(folder, read_quantization(folder))


def values_of(part: PackedWeight, in_features: int) -> torch.Tensor:
    """What each input feature is multiplied by."""
    found = unpack(part)
    if part.order is None:
        return found
    out, kept = torch.zeros(part.shape[0], in_features), part.order >= 0
    out[:, part.order[kept].long()] = found[:, kept]
    return out


def linears(decoder):
    for layer in decoder.layers:
        yield from (layer.attention.qkv, layer.attention.out, layer.mlp.gate_up, layer.mlp.down)
    yield decoder.head


def test_values_are_what_the_bits_say(checkpoint):
    folder, values = checkpoint
    source = open_source(folder)
    for name, expected in values.items():
        assert source.shape(name) == tuple(expected.shape)
        assert torch.equal(source.read(name), expected), name


def test_parts_of_tensors(checkpoint):
    folder, values = checkpoint
    source, name = open_source(folder), "model.layers.1.mlp.down_proj.weight"
    for part in ((range(256), range(192, 384)), (range(8, 40), range(384)), (range(3, 21), range(36, 100))):
        assert torch.equal(source.read(name, part), values[name][slices(part)]), part


@pytest.mark.parametrize("topology", [Topology(tp=2), Topology(tp=2, pp=2)], ids=str)
def test_parts_of_ranks(checkpoint, topology):
    folder, values = checkpoint
    for own in ParallelLayout.of(read_spec(folder), topology, weights=unit_format(folder, "auto")).ranks:
        parts = wanted_parts(own)
        weights = Weights(open_source(folder), wanted_shapes(own), parts=parts)
        for name in wanted_shapes(own):
            expected = values[name][slices(parts[name])] if name in parts else values[name]
            assert torch.equal(weights.take(name), expected), name


@needs_kernels
@pytest.mark.parametrize("tp", [1, 2])
def test_kernels_keep_the_codes(checkpoint, layout, tp):
    folder, values = checkpoint
    settings = LAYOUTS[layout]
    cut = ParallelLayout.of(read_spec(folder), Topology(tp=tp), weights=unit_format(folder, "auto"))
    for rank, own in enumerate(cut.ranks):
        decoder = load_model(
            folder, dtype="auto", device=CPU, shard=replace(Shard.whole(own.spec), layout=cut, rank=rank)
        )
        assert decoder.weights_format == read_quantization(folder).name
        parts = wanted_parts(own)
        for linear, modules in zip(linears(decoder), fused_linears(own).values(), strict=True):
            names = [module + ".weight" for module in modules]
            expected = torch.cat([values[n][slices(parts[n])] if n in parts else values[n] for n in names])
            found = torch.cat([values_of(part, expected.shape[1]) for part in linear.parts])
            assert torch.equal(found, expected)
            x = torch.randn((5, expected.shape[1]), generator=torch.Generator().manual_seed(1))
            error = linear.apply(x) - x @ expected.T
            assert error.norm() < 0.012 * (x @ expected.T).norm()  # inputs in 8 bits
        qkv = decoder.layers[0].attention.qkv.parts
        assert len(qkv) == (3 if settings.get("desc_act") else 1)
        assert all((part.offsets is Offsets.NONE) == bool(settings.get("sym")) for part in qkv)
        assert all((part.order is None) == (not settings.get("desc_act")) for part in qkv)


def torch_linears(monkeypatch, folder, **options):
    with monkeypatch.context() as patch:
        patch.setattr(loader, "_native_linears", lambda: False)
        return list(linears(load_model(folder, device=CPU, **{"dtype": "float32"} | options)))


def test_torch_dequantises_by_tiles(checkpoint, monkeypatch):
    folder, values = checkpoint
    monkeypatch.setattr("warmroot.actors.layers.grouped._TILE_VALUES", 100 * 256)
    found = torch_linears(monkeypatch, folder)
    for linear, modules in zip(found, fused_linears(whole_model(read_spec(folder))).values(), strict=True):
        expected = torch.cat([values[module + ".weight"] for module in modules])
        x = torch.randn((5, expected.shape[1]), generator=torch.Generator().manual_seed(1))
        torch.testing.assert_close(linear.apply(x), x @ expected.T, rtol=0, atol=1e-4)
        assert isinstance(linear, DenseLinear if modules == ("lm_head",) else GroupedLinear)


@pytest.mark.parametrize("name", ["gptq", "gptq symmetric", "gptq whole rows", "gptq 8 bits", "awq"])
def test_torch_keeps_what_plan_says(tmp_path, monkeypatch, name):
    write_folder(tmp_path / "m", LAYOUTS[name])
    config, own = read_quantization(tmp_path / "m"), whole_model(spec_from_hf(LLAMA))
    kept = KeptWeights.plain("float32").with_codes(config, own.linears())
    for linear, modules in zip(
        torch_linears(monkeypatch, tmp_path / "m"), list(fused_linears(own).values())[:-1], strict=False
    ):
        shapes = {f"{module}.weight": wanted_shapes(own)[f"{module}.weight"] for module in modules}
        assert sum(tensor.nbytes for tensor in linear.tensors) == sum(
            kept.linear_bytes(weight, *shape) for weight, shape in shapes.items()
        )


def test_none_dequantises(tmp_path, monkeypatch):
    write_folder(tmp_path / "m", gptq())
    assert all(
        isinstance(linear, DenseLinear) for linear in torch_linears(monkeypatch, tmp_path / "m", quantization="none")
    )


def test_biases_and_mixtures(tmp_path):
    """Experts are linears like others; routers and shared gates are floats."""
    config = LLAMA | {
        "architectures": ["Qwen2MoeForCausalLM"],
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 128,
        "shared_expert_intermediate_size": 128,
        "norm_topk_prob": False,
    }
    for settings in (gptq(group_size=64, desc_act=True), awq()):
        folder = tmp_path / settings["quant_method"]
        write_folder(folder, settings, config)
        spec = spec_from_hf(config)
        assert spec.qkv_bias
        exact = load_model(folder.with_name(folder.name + "-plain"), dtype="float32", device=CPU)
        decoder = load_model(folder, dtype="auto", device=CPU)
        x = torch.randn((6, 256), generator=torch.Generator().manual_seed(3))
        for found, expected in zip(decoder.layers, exact.layers, strict=True):
            assert (
                found.attention.qkv.apply(x) - expected.attention.qkv.apply(x)
            ).norm() < 0.012 * expected.attention.qkv.apply(x).norm()
            assert (found.mlp(x) - expected.mlp(x)).norm() < 0.03 * expected.mlp(x).norm()


@needs_kernels
@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({}, "gptq-int4-g128"),
        ({"quantization": "gptq"}, "gptq-int4-g128"),
        ({"dtype": "bfloat16"}, "gptq-int4-g128+bfloat16"),
        ({"quantization": "none"}, "gptq-int4-g128-as-float16"),
        ({"quantization": "none", "dtype": "float32"}, "gptq-int4-g128-as-float32"),
        ({"quantization": "int8"}, "gptq-int4-g128-as-int8"),
    ],
)
def test_forms_have_names_of_their_own(tmp_path, options, name):
    write_folder(tmp_path / "m", gptq())
    assert load_model(tmp_path / "m", device=CPU, **{"dtype": "auto"} | options).weights_format == name


def test_a_method_is_what_the_checkpoint_is(tmp_path):
    write_folder(tmp_path / "m", awq())
    with pytest.raises(ConfigError, match="gptq says what the checkpoint is, but its weights are quantised with awq"):
        load_model(tmp_path / "m", dtype="auto", quantization="gptq", device=CPU)
    with pytest.raises(ConfigError, match="not quantised by one"):
        load_model(tmp_path / "m-plain", dtype="auto", quantization="awq", device=CPU)


@pytest.mark.parametrize("settings", [gptq(), awq()], ids=["gptq", "awq"])
@pytest.mark.parametrize("part", ["scales", "qzeros", "fewer scales", "qweight"])
def test_damaged_tensors_are_named(tmp_path, settings, part):
    write_folder(tmp_path / "m", settings)
    file, module = tmp_path / "m" / "model.safetensors", "model.layers.1.mlp.up_proj"
    tensors = load_file(file)
    if part == "fewer scales":
        tensors[f"{module}.scales"] = tensors[f"{module}.scales"][:-1].contiguous()
    else:
        del tensors[f"{module}.{part}"]
    save_file(tensors, file)
    with pytest.raises(
        ModelLoadError, match=f"model.safetensors.*{module}.weight is|tensor {module}.weight is missing"
    ):
        load_model(tmp_path / "m", dtype="float32", device=CPU)


@pytest.mark.parametrize(
    ("quantization", "error"), [("int8", 0.006), ("int4", 0.09), ("int4-g64", 0.1), ("int4-g128", 0.12)]
)
def test_quantising_on_load(tmp_path, monkeypatch, quantization, error):
    """By torch and by the kernels to the same size of error; groups that do not divide a row end with a smaller one."""
    config = LLAMA | {"hidden_size": 192, "num_attention_heads": 3, "num_key_value_heads": 1, "intermediate_size": 160}
    write_folder(tmp_path / "m", gptq(), config)
    plain = tmp_path / "m-plain"
    tensors = {
        name: torch.randn(tensor.shape, generator=torch.Generator().manual_seed(5)) if tensor.dim() > 1 else tensor
        for name, tensor in load_file(plain / "model.safetensors").items()
    }
    save_file(tensors, plain / "model.safetensors")
    exact = list(linears(load_model(plain, dtype="float32", device=CPU)))
    kinds = [torch_linears(monkeypatch, plain, quantization=quantization)]
    if native() is not None:
        decoder = load_model(plain, dtype="auto", quantization=quantization, device=CPU)
        assert decoder.weights_format == quantization
        kinds.append(list(linears(decoder)))
    for kind in kinds:
        for linear, expected in zip(kind, exact, strict=True):
            x = torch.randn((8, expected.parts[0].shape[1]), generator=torch.Generator().manual_seed(6))
            difference = linear.apply(x) - expected.apply(x)
            assert difference.norm() < (error + 0.008) * expected.apply(x).norm()
