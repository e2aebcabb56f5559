"""Loading: shards, prefixes, storage types, progress, and errors that say what is wrong."""

import json

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from warmroot.actors.kernels.library import native
from warmroot.actors.models.gguf_source import GgufSource
from warmroot.actors.models.loader import load_model, read_spec
from warmroot.actors.models.safetensors_source import SafetensorsSource
from warmroot.actors.models.tensors import wanted_tensors
from warmroot.actors.models.weights import Weights
from warmroot.cluster.errors import ConfigError, ModelLoadError
from warmroot.cluster.model_config import spec_from_hf

CPU = torch.device("cpu")
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "eos_token_id": 2,
}
WANTED = wanted_tensors(spec_from_hf(CONFIG))


def random_tensors(dtype=torch.float32):
    torch.manual_seed(0)
    return {name: (0.1 * torch.randn(shape)).to(dtype) for name, shape in WANTED.items()}


def write_folder(folder, tensors, config=CONFIG):
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return folder


def write_shards(folder, tensors):
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    names = list(tensors)
    weight_map = {}
    for shard, part in enumerate((names[:7], names[7:])):
        file = f"model-{shard + 1:05}-of-00002.safetensors"
        save_file({name: tensors[name] for name in part}, folder / file)
        weight_map |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


def test_one_file_and_shards_hold_the_same(tmp_path):
    tensors = random_tensors()
    for folder in (write_folder(tmp_path / "one", tensors), write_shards(tmp_path / "two", tensors)):
        source = SafetensorsSource(folder)
        for name, shape in WANTED.items():
            assert source.shape(name) == shape
            assert torch.equal(source.read(name), tensors[name])


@pytest.mark.parametrize("prefix", ["language_model.", "model.language_model.", ""])
def test_prefixes_of_multimodal_and_bare_checkpoints(tmp_path, prefix):
    def renamed(name):
        if prefix == "language_model.":
            return prefix + name
        return prefix + name.removeprefix("model.") if name.startswith("model.") else name

    tensors = random_tensors()
    source = SafetensorsSource(write_folder(tmp_path, {renamed(name): t for name, t in tensors.items()}))
    for name in WANTED:
        assert torch.equal(source.read(name), tensors[name])


def test_progress_ends_at_the_total(tmp_path):
    calls = []
    load_model(
        write_folder(tmp_path, random_tensors()),
        dtype="float32",
        device=CPU,
        progress=lambda done, total: calls.append((done, total)),
    )
    assert len(calls) == len(WANTED)
    assert [done for done, _ in calls] == sorted(done for done, _ in calls)
    assert calls[-1][0] == calls[-1][1] == 4 * spec_from_hf(CONFIG).num_parameters


@pytest.mark.parametrize(
    ("stored", "asked", "activations"),
    [
        (torch.bfloat16, "auto", torch.float32),
        (torch.float32, "float16", torch.float32),
        # The native kernels compute in float32 whatever the weights are.
        (torch.bfloat16, "bfloat16", torch.bfloat16 if native() is None else torch.float32),
        (torch.bfloat16, "float32", torch.float32),
    ],
)
def test_dtypes_on_a_cpu(tmp_path, stored, asked, activations):
    decoder = load_model(write_folder(tmp_path, random_tensors(stored)), dtype=asked, device=CPU)
    assert decoder.dtype == activations
    hidden = torch.randn(3, 32).to(activations)
    assert decoder.logits(hidden).dtype == torch.float32
    expected = hidden.float() @ random_tensors(stored)["lm_head.weight"].float().T
    torch.testing.assert_close(decoder.logits(hidden), expected, atol=2e-2, rtol=1e-2)


def test_unknown_dtype(tmp_path):
    with pytest.raises(ConfigError, match="int3"):
        load_model(tmp_path, dtype="int3", device=CPU)


def test_missing_tensor_is_named_before_any_is_read(tmp_path):
    tensors = random_tensors()
    del tensors["model.layers.1.mlp.up_proj.weight"]
    calls = []
    with pytest.raises(ModelLoadError, match=r"model\.layers\.1\.mlp\.up_proj\.weight is missing.*\[64, 32\]"):
        load_model(write_folder(tmp_path, tensors), dtype="auto", device=CPU, progress=lambda *args: calls.append(args))
    assert calls == []


def test_wrong_shape_names_file_tensor_and_shapes(tmp_path):
    tensors = random_tensors() | {"lm_head.weight": torch.zeros(63, 32)}
    with pytest.raises(
        ModelLoadError, match=r"model\.safetensors: .*lm_head\.weight .*\[63, 32\], expected \[64, 32\]"
    ):
        load_model(write_folder(tmp_path, tensors), dtype="auto", device=CPU)


def test_integer_tensor_is_refused(tmp_path):
    tensors = random_tensors() | {"lm_head.weight": torch.zeros(64, 32, dtype=torch.int8)}
    with pytest.raises(ModelLoadError, match=r"lm_head\.weight is stored as I8, expected one of F32"):
        load_model(write_folder(tmp_path, tensors), dtype="auto", device=CPU)


def test_damaged_and_absent_files(tmp_path):
    with pytest.raises(ModelLoadError, match=r"no config\.json"):
        read_spec(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelLoadError, match="not JSON"):
        read_spec(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    with pytest.raises(ModelLoadError, match=r"no \*\.safetensors"):
        load_model(tmp_path, dtype="auto", device=CPU)
    (tmp_path / "model.safetensors").write_bytes(b"no such thing")
    with pytest.raises(ModelLoadError, match=r"model\.safetensors: cannot be read"):
        load_model(tmp_path, dtype="auto", device=CPU)
    (tmp_path / "weights.gguf").write_bytes(b"no such thing")
    with pytest.raises(ModelLoadError, match=r"weights\.gguf: cannot be read as GGUF"):
        read_spec(tmp_path / "weights.gguf")


def test_absent_shard_is_named(tmp_path):
    folder = write_shards(tmp_path / "model", random_tensors())
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ModelLoadError, match="model-00002-of-00002"):
        load_model(folder, dtype="auto", device=CPU)


def test_quantised_checkpoint_is_refused_by_name(tmp_path):
    folder = write_folder(tmp_path, random_tensors(), CONFIG | {"quantization_config": {"quant_method": "fp6"}})
    with pytest.raises(ConfigError, match="fp6"):
        read_spec(folder)


def test_generation_config_is_read(tmp_path):
    folder = write_folder(tmp_path, random_tensors())
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 2]}))
    assert read_spec(folder).eos_token_ids == (5, 2)


Storage = gguf.GGMLQuantizationType


def write_gguf(path, embedding, storage):
    writer = gguf.GGUFWriter(path, "qwen2")
    writer.add_tensor("token_embd.weight", embedding, raw_dtype=storage)
    for write in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file):
        write()
    writer.close()
    return GgufSource(path)


@pytest.mark.parametrize("storage", [Storage.F32, Storage.F16, Storage.BF16, Storage.Q8_0, Storage.Q4_0, Storage.Q4_1])
def test_gguf_storage_types(tmp_path, storage):
    values = np.random.default_rng(0).standard_normal((6, 64)).astype(np.float32)
    source = write_gguf(tmp_path / "x.gguf", gguf.quantize(values, storage), storage)
    weights = Weights(source, {"model.embed_tokens.weight": (6, 64)})
    error = np.abs(weights.take("model.embed_tokens.weight").float().numpy() - values).max()
    assert error <= {"F32": 0.0, "F16": 2e-3, "BF16": 2e-2, "Q8_0": 2e-2}.get(storage.name, 0.4)


@pytest.mark.parametrize("storage", [Storage.Q4_K, Storage.Q5_K, Storage.Q6_K])
def test_gguf_k_quants(tmp_path, storage):
    """One super-block by hand: scales of one and zero minima, so that values are the stored integers."""
    block = np.zeros((1, gguf.GGML_QUANT_SIZES[storage][1]), dtype=np.uint8)
    one = np.frombuffer(np.float16(1.0).tobytes(), dtype=np.uint8)
    if storage == Storage.Q6_K:  # 128 low nibbles, 64 high pairs, 16 int8 scales, d
        block[:, :128], block[:, 192:208], block[:, 208:] = 0x77, 1, one
        expected = 7 - 32
    else:  # d, dmin, 12 bytes of packed 6-bit scales and minima, (high bits,) nibbles
        block[:, :2] = one
        block[:, 4:8] = 1  # scales of the first four groups
        block[:, 12:16] = 1  # scales of the last four, in low nibbles
        block[:, -128:] = 0x77
        expected = 7
    source = write_gguf(tmp_path / "x.gguf", block, storage)
    weight = source.read("model.embed_tokens.weight")
    assert source.shape("model.embed_tokens.weight") == (1, 256)
    assert torch.equal(weight, torch.full((1, 256), float(expected)))


def test_gguf_of_an_unknown_storage_type(tmp_path):
    block = np.zeros((1, gguf.GGML_QUANT_SIZES[Storage.Q2_K][1]), dtype=np.uint8)
    source = write_gguf(tmp_path / "x.gguf", block, Storage.Q2_K)
    with pytest.raises(ModelLoadError, match=r"x\.gguf \(token_embd\.weight\).* stored as Q2_K, expected one of F32"):
        source.read("model.embed_tokens.weight")
