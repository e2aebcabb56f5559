"""Other weights beside those in use: what is adopted computes as if it had been loaded at the start."""

import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from training_models import small_llama

from warmroot.actors.engine.config import EngineConfig
from warmroot.actors.engine.engine import Engine
from warmroot.actors.models.loader import load_model
from warmroot.actors.models.source import resolve_model
from warmroot.actors.models.tensor_source import TensorSource
from warmroot.actors.parallel.shard import Shard
from warmroot.actors.runner.load import KvMemoryConfig, load_runner
from warmroot.actors.runner.next_weights import NextWeights
from warmroot.actors.runner.runner import ModelRunner
from warmroot.cluster.errors import EngineError, ModelLoadError
from warmroot.cluster.ids import RequestId
from warmroot.cluster.messages import GenerateRequest
from warmroot.cluster.sampling_params import SamplingParams
from warmroot.cluster.speculative_config import read_speculative_config
from warmroot.kv_store.hashing import namespace_root

PROMPT = [5, 9, 70, 31, 8, 22, 60, 17, 44, 3, 90, 71, 12, 6, 33, 18, 55, 47]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A model, and the same one after some training."""
    old, new = tmp_path_factory.mktemp("old"), tmp_path_factory.mktemp("new")
    model = small_llama()
    model.save_pretrained(old)
    for parameter in model.parameters():
        parameter.data.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)), alpha=0.1)
    model.save_pretrained(new)
    return old, new


def load(folder: Path, quantization: str, **options) -> tuple[ModelRunner, NextWeights]:
    kv = KvMemoryConfig(block_size=4, num_kv_blocks=60)
    runner = load_runner(folder, dtype="float32", quantization=quantization, kv=kv, **options)
    shard = Shard.whole(runner.decoder.spec)
    following = NextWeights(runner.decoder, shard, dtype="float32", quantization=quantization)
    runner.renew_with(following)
    return runner, following


def start(runner: ModelRunner, version: str, **options) -> Engine:
    config = EngineConfig(max_model_len=200, max_num_seqs=4, max_num_batched_tokens=32, **options)
    return Engine(runner, config, time.monotonic, namespace_root("m", version), weights_version=version)


def generate(engine: Engine, name: str, num_tokens: int = 20) -> list[int]:
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    engine.add(GenerateRequest(request_id=RequestId(name), prompt_token_ids=PROMPT, params=params))
    tokens: list[int] = []
    while engine.has_work:
        for delta in engine.step():
            assert delta.error is None
            tokens += delta.token_ids
    return tokens


def adopt(engine: Engine, version: str) -> None:
    engine.adopt(version, namespace_root("m", version))


@pytest.mark.parametrize("quantization", ["auto", "int8", "int4"])
def test_after_a_change_it_computes_as_if_loaded_with_the_new_weights(folders, quantization: str):
    runner, following = load(folders[0], quantization)
    engine = start(runner, "old")
    before = generate(engine, "a")
    assert following.prepare("new", folders[1]) == runner.decoder.weights_format
    assert generate(engine, "b") == before
    adopt(engine, "new")
    after = generate(engine, "c")
    assert after == generate(start(load(folders[1], quantization)[0], "new"), "c") != before
    following.prepare("back", folders[0])
    adopt(engine, "back")
    assert generate(engine, "d") == before


@pytest.mark.parametrize("quantization", ["auto", "int8"])
def test_tensors_without_files_are_the_same_as_a_checkpoint(folders, quantization: str, monkeypatch, tmp_path):
    monkeypatch.setenv("WARMROOT_CACHE_DIR", str(tmp_path))
    tensors = load_file(folders[1] / "model.safetensors")
    described = {name: (tuple(tensor.shape), "float32") for name, tensor in tensors.items()}
    runner, following = load(folders[0], quantization)
    kept = sorted(tmp_path.rglob("*.bin"))
    following.prepare("new", TensorSource(described, tensors.__getitem__, "the test"))
    assert sorted(tmp_path.rglob("*.bin")) == kept
    engine = start(runner, "old")
    adopt(engine, "new")
    assert generate(engine, "a") == generate(start(load(folders[1], quantization)[0], "new"), "a")


def test_drafting_layers_change_with_the_model(folders):
    speculation = read_speculative_config({"method": "layer_skip", "num_speculative_tokens": 3, "adaptive": False})
    runner, following = load(folders[0], "auto", speculation=speculation)
    engine = start(runner, "old", speculation=speculation)
    generate(engine, "a")
    following.prepare("new", folders[1])
    adopt(engine, "new")
    assert generate(engine, "b") == generate(start(load(folders[1], "auto")[0], "new"), "b")
    assert runner._drafter._layers._decoder.layers[0] is runner.decoder.layers[0]  # type: ignore[union-attr]


def test_off_the_cpu_new_weights_take_the_dtype_that_the_first_ones_decided(folders, tmp_path: Path):
    small_llama().to(torch.bfloat16).save_pretrained(tmp_path)
    decoder = load_model(tmp_path, dtype="auto", device=torch.device("meta"))
    following = NextWeights(decoder, Shard.whole(decoder.spec), dtype="auto", quantization="auto")
    following.prepare("new", folders[1])  # of float32
    following.adopt("new")
    assert (decoder.dtype, decoder.head.weight.dtype) == (torch.bfloat16, torch.bfloat16)


def spoilt(source: Path, folder: Path, change) -> Path:
    tensors = load_file(source / "model.safetensors")
    change(tensors)
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text((source / "config.json").read_text())
    save_file(tensors, folder / "model.safetensors")
    return folder


NORM = "model.layers.1.input_layernorm.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors: tensors.pop(NORM), "missing"),
        (lambda tensors: tensors.update({NORM: torch.zeros(31)}), r"has shape \[31\], expected \[32\]"),
        (lambda tensors: tensors[NORM].fill_(float("nan")), "not finite"),
        (lambda tensors: tensors["model.layers.0.mlp.up_proj.weight"][3].fill_(float("inf")), "not finite"),
    ],
)
def test_what_is_wrong_is_refused_and_changes_nothing(folders, tmp_path: Path, change, message: str):
    runner, following = load(folders[0], "auto")
    engine = start(runner, "old")
    before = generate(engine, "a")
    with pytest.raises(ModelLoadError, match=message):
        following.prepare("bad", spoilt(folders[1], tmp_path / "bad", change))
    assert generate(engine, "b") == before
    with pytest.raises(EngineError, match="no weights of version bad"):
        following.adopt("bad")


def test_another_model_is_refused(folders, tmp_path: Path):
    small_llama(hidden_size=64).save_pretrained(tmp_path)
    _, following = load(folders[0], "auto")
    with pytest.raises(ModelLoadError, match="not the model that is served: hidden_size 64 is not 32"):
        following.prepare("other", tmp_path)


@pytest.mark.parametrize(
    ("described", "message"),
    [
        ({}, "has no tensors"),
        ({NORM: ((32,), "int8")}, "has int8, expected one of float32, float16, bfloat16"),
        ({NORM: ((32,), "float32")}, "missing"),
    ],
)
def test_tensors_that_do_not_suit_are_refused(folders, described, message: str):
    _, following = load(folders[0], "auto")
    with pytest.raises(ModelLoadError, match=message):
        following.prepare("x", TensorSource(described, lambda name: torch.zeros(32), "actor a"))


def test_a_tensor_that_is_not_what_it_was_said_to_be_is_refused():
    source = TensorSource({"a": ((2, 3), "float32")}, lambda name: torch.zeros(2, 2), "actor a")
    with pytest.raises(ModelLoadError, match=r"tensor a came as \[2, 2\] torch.float32, not \[2, 3\] float32"):
        source.read("a")


@pytest.mark.model
def test_a_model_of_blocks_takes_plain_tensors(tmp_path: Path):
    """SmolLM2 is a GGUF file: an update by Hugging Face's names changes the form of its weights."""
    runner, following = load(resolve_model("smollm2"), "auto")
    from warmroot.actors.models.gguf_source import GgufSource
    from warmroot.actors.models.tensors import wanted_tensors

    source, shapes = GgufSource(resolve_model("smollm2")), wanted_tensors(runner.decoder.spec)
    described = {name: (shape, "float32") for name, shape in shapes.items()}
    formed = following.prepare("plain", TensorSource(described, lambda name: source.read(name).float(), "the test"))
    engine = start(runner, "old")
    before = generate(engine, "a", 8)
    adopt(engine, "plain")
    assert generate(engine, "b", 8) == before
    assert runner.decoder.weights_format == formed
