"""The file of packed weights: found again, made again when it must be, and never half a file."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from warmroot.actors.kernels.library import native
from warmroot.actors.models import packed_cache
from warmroot.actors.models.loader import load_model
from warmroot.actors.models.tensors import wanted_tensors
from warmroot.cluster.model_config import spec_from_hf

pytestmark = pytest.mark.skipif(native() is None, reason="no native kernels here")

CPU = torch.device("cpu")
CONFIG = {
    "architectures": ["Qwen2ForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 70,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "eos_token_id": 2,
}


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("WARMROOT_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache" / "packed"


@pytest.fixture
def folder(tmp_path):
    return write_folder(tmp_path / "model", seed=0)


def write_folder(folder, seed):
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    generator = torch.Generator().manual_seed(seed)
    shapes = wanted_tensors(spec_from_hf(CONFIG))
    save_file(
        {name: 0.1 * torch.randn(shape, generator=generator) for name, shape in shapes.items()},
        folder / "model.safetensors",
    )
    return folder


@pytest.fixture
def packs(monkeypatch):
    """Names of the linears that were packed."""
    names = []

    def counted(weights, spec, packing):
        for name, parts in pack_linears(weights, spec, packing):
            names.append(name)
            yield name, parts

    pack_linears = packed_cache.pack_linears
    monkeypatch.setattr(packed_cache, "pack_linears", counted)
    return names


def values(decoder):
    """Products that every weight and bias of the decoder is in."""
    linears = [
        linear
        for layer in decoder.layers
        for linear in (layer.attention.qkv, layer.attention.out, layer.mlp.gate_up, layer.mlp.down)
    ]
    # Which kernels multiply float16 is measured: they may be another library's.
    sizes = [getattr(linear, "own", linear).parts[0].shape[1] for linear in linears]
    outputs = [linear.apply(torch.ones(1, size)) for linear, size in zip(linears, sizes, strict=True)]
    return torch.cat([*outputs, decoder.logits(torch.ones(1, 64)), decoder.embedding(torch.arange(70)).view(1, -1)], 1)


def load(folder, **options):
    return load_model(folder, **{"dtype": "auto", "device": CPU, **options})


def files(cache):
    return sorted(path for path in cache.iterdir() if path.suffix == ".bin")


def test_the_second_load_maps_what_the_first_packed(folder, cache, packs):
    first = values(load(folder))
    assert len(packs) == 9
    calls = []
    second = load(folder, progress=lambda done, total: calls.append((done, total)))
    assert len(packs) == 9
    assert torch.equal(values(second), first)
    assert calls[-1][0] == calls[-1][1]
    assert getattr(second.head, "own", second.head).parts[0].data.data_ptr() % 64 == 0
    assert [path.suffix for path in cache.iterdir()].count(".partial") == 0


def test_forms_and_models_have_files_of_their_own(folder, cache, tmp_path):
    load(folder)
    load(folder, quantization="int8")
    load(folder, dtype="float32")
    load(write_folder(tmp_path / "other", seed=1))
    assert len(files(cache)) == 4


def test_a_changed_checkpoint_is_packed_again_and_the_old_file_goes(folder, cache, packs):
    before, [old] = values(load(folder)), files(cache)
    write_folder(folder, seed=1)
    os.utime(folder / "model.safetensors", ns=(1, 1))
    assert not torch.equal(values(load(folder)), before)
    assert len(packs) == 18
    assert len(files(cache)) == 1
    assert not old.exists()


@pytest.mark.parametrize("damage", ["truncated", "empty", "index", "place"])
def test_a_damaged_file_is_replaced(folder, cache, packs, damage, caplog):
    expected, [path] = values(load(folder)), files(cache)
    data = path.read_bytes()
    damaged = {
        "truncated": data[: len(data) // 2],
        "empty": b"",
        "index": data.replace(b'"offsets"', b'"outsets"', 1),
        "place": data[:-16] + bytes(8) + data[-8:],
    }[damage]
    path.unlink()  # whoever has it mapped keeps it
    path.write_bytes(damaged)
    assert torch.equal(values(load(folder)), expected)
    assert "cannot be used" in caplog.text
    assert len(packs) == 18
    assert torch.equal(values(load(folder)), expected)
    assert len(packs) == 18


def test_a_file_that_promises_too_much_is_refused(folder, cache, packs):
    """A right digest over wrong sizes: the kernels must never read past the map."""
    load(folder)
    [path] = files(cache)
    linears = packed_cache.map_packed(path)
    part = linears.parts["output"][0]
    forged = cache / "forged.bin"
    with forged.open("wb") as file:
        short = type(part)(part.format, part.offsets, part.shape, part.data[:-64], part.bias)
        parts = linears.parts | {"output": (short,)}
        packed_cache.write_packed(file, linears.format, linears.table, parts.items())
    with pytest.raises(ValueError, match="bytes at"):
        packed_cache.map_packed(forged)


def test_a_folder_that_cannot_be_written_costs_a_warning(folder, monkeypatch, tmp_path, packs, caplog):
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setenv("WARMROOT_CACHE_DIR", str(tmp_path / "file"))
    first, second = values(load(folder)), values(load(folder))
    assert torch.equal(first, second)
    assert len(packs) == 18
    assert "cannot be kept in" in caplog.text


def test_a_full_disk_leaves_nothing_behind(folder, cache, monkeypatch, caplog):
    expected = values(load(folder, dtype="auto"))
    for path in files(cache):
        path.unlink()

    def full(file, *_):
        file.write(b"something")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(packed_cache, "write_packed", full)
    assert torch.equal(values(load(folder)), expected)
    assert "No space left on device" in caplog.text
    assert [path for path in cache.iterdir() if path.suffix != ".lock"] == []


def test_processes_that_pack_at_the_same_time_write_one_file(folder, cache):
    script = (
        "import sys, torch; from pathlib import Path\n"
        "from warmroot.actors.models.loader import load_model\n"
        "decoder = load_model(Path(sys.argv[1]), dtype='auto', device=torch.device('cpu'))\n"
        "print(float(decoder.logits(torch.ones(1, 64)).sum()))\n"
    )
    processes = [
        subprocess.Popen([sys.executable, "-c", script, str(folder)], stdout=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    outputs = {process.communicate()[0] for process in processes}
    assert [process.returncode for process in processes] == [0, 0, 0]
    assert len(outputs) == 1
    assert len(files(cache)) == 1


def test_where_the_cache_is(monkeypatch, tmp_path):
    monkeypatch.delenv("WARMROOT_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert packed_cache.cache_dir() == tmp_path / "warmroot"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert packed_cache.cache_dir() == tmp_path / ".cache" / "warmroot"


def test_without_native_kernels_torch_does_the_work(folder):
    """In a process of its own: the library is chosen once."""
    script = (
        "import sys, torch; from pathlib import Path\n"
        "from warmroot.actors.models.available import cpu_kernels\n"
        "from warmroot.actors.models.loader import load_model\n"
        "for form in ('auto', 'int8', 'int4-g64'):\n"
        "  decoder = load_model(Path(sys.argv[1]), dtype='auto', quantization=form, device=torch.device('cpu'))\n"
        "  print(cpu_kernels(), decoder.weights_format, decoder.backend.name, sep='|')\n"
    )
    environment = {**os.environ, "WARMROOT_KERNELS": "off"}
    run = subprocess.run(
        [sys.executable, "-c", script, str(folder)], capture_output=True, text=True, env=environment, check=True
    )
    kernels = "torch (no native kernels: switched off by WARMROOT_KERNELS)"
    assert run.stdout.splitlines() == [f"{kernels}|{form}|torch" for form in ("float16", "int8", "int4-g64")]
    assert not (Path(folder).parent / "cache").exists()
