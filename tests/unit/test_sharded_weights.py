"""What a rank reads of a checkpoint, and where its packed weights are kept."""

import json
from dataclasses import replace

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from warmroot.actors.kernels.library import native
from warmroot.actors.models.gguf_source import GgufSource
from warmroot.actors.models.loader import load_model
from warmroot.actors.models.safetensors_source import SafetensorsSource
from warmroot.actors.models.tensors import (
    fused_linears,
    rank_spec,
    slices,
    wanted_parts,
    wanted_shapes,
    wanted_tensors,
    whole_model,
)
from warmroot.actors.models.weights import Weights
from warmroot.actors.parallel.shard import Shard
from warmroot.cluster.model_config import spec_from_hf
from warmroot.cluster.model_tensors import EMBEDDING, FINAL_NORM, HEAD
from warmroot.cluster.parallel_layout import ParallelLayout
from warmroot.cluster.topology import Topology

CPU = torch.device("cpu")
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 32,
    "vocab_size": 71,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "mlp_bias": True,
    "attention_bias": True,
    "eos_token_id": 2,
}
SPEC = spec_from_hf(CONFIG)
Storage = gguf.GGMLQuantizationType


def layout(tp=1, pp=1, spec=SPEC) -> ParallelLayout:
    return ParallelLayout.of(spec, Topology(tp=tp, pp=pp))


def shard(cut: ParallelLayout, rank: int) -> Shard:
    return replace(Shard.whole(SPEC), layout=cut, rank=rank)


@pytest.fixture
def tensors():
    generator = torch.Generator().manual_seed(0)
    return {name: 0.1 * torch.randn(shape, generator=generator) for name, shape in wanted_tensors(SPEC).items()}


@pytest.fixture
def folder(tmp_path, tensors):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(CONFIG))
    save_file(tensors, tmp_path / "model" / "model.safetensors")
    return tmp_path / "model"


def test_the_parts_of_all_ranks_make_the_model(folder, tensors):
    cut = layout(tp=2, pp=2)
    seen = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    for own in cut.ranks:
        parts = wanted_parts(own)
        weights = Weights(SafetensorsSource(folder), wanted_shapes(own), parts=parts)
        for name, shape in wanted_shapes(own).items():
            part, tensor = parts.get(name, tuple(map(range, shape))), weights.take(name)
            assert tuple(tensor.shape) == weights.shape(name)
            assert torch.equal(tensor, tensors[name][slices(part)])
            seen[name][slices(part)] += 1
    norms = {name for name in seen if "norm" in name}
    assert all((counts == (2 if name in norms else 1)).all() for name, counts in seen.items())


def test_biases_of_summed_linears_are_the_first_ranks():
    first, second = (wanted_shapes(own) for own in layout(tp=2).ranks)
    assert {name for name in first if name not in second} == {
        f"model.layers.{layer}.{name}.bias" for layer in range(3) for name in ("self_attn.o_proj", "mlp.down_proj")
    }


def test_stages_have_their_layers_and_ends():
    first, last = layout(pp=2).ranks
    assert [*first.layers, *last.layers] == [0, 1, 2]
    assert (EMBEDDING in wanted_shapes(first), EMBEDDING in wanted_shapes(last)) == (True, False)
    for name in (FINAL_NORM, HEAD):
        assert (name in wanted_shapes(first), name in wanted_shapes(last)) == (False, True)
    assert wanted_parts(first) == wanted_parts(last) == {}
    assert ("output" in fused_linears(first), "output" in fused_linears(last)) == (False, True)
    assert not fused_linears(first).keys() & fused_linears(last).keys()
    whole = fused_linears(whole_model(SPEC))
    assert fused_linears(first) | fused_linears(last) == whole


def test_a_tied_head_is_read_where_logits_are_made():
    last = layout(pp=2, spec=spec_from_hf(CONFIG | {"tie_word_embeddings": True})).ranks[1]
    assert EMBEDDING in wanted_shapes(last)
    assert fused_linears(last)["output"] == ("model.embed_tokens",)


def test_the_ranks_view_of_the_model():
    one, other = (rank_spec(own) for own in layout(tp=2).ranks)
    assert (one.num_heads, one.num_kv_heads, other.num_heads, other.num_kv_heads) == (4, 2, 2, 1)
    assert one.intermediate_size + other.intermediate_size == 128
    assert (one.vocab_size, one.hidden_size, one.num_layers) == (71, 64, 3)
    assert rank_spec(whole_model(SPEC)) == SPEC


def test_progress_counts_what_the_rank_reads(folder):
    calls = []
    cut = layout(tp=2)
    load_model(
        folder,
        dtype="float32",
        device=CPU,
        progress=lambda done, total: calls.append((done, total)),
        shard=shard(cut, 1),
    )
    biases = 4 * 3 * 2 * 64  # left to rank 0
    assert calls[-1][0] == calls[-1][1] == 4 * cut.ranks[1].num_parameters - biases


@pytest.mark.skipif(native() is None, reason="no native kernels here")
def test_each_rank_has_a_file_of_its_own(folder, tmp_path, monkeypatch):
    monkeypatch.setenv("WARMROOT_CACHE_DIR", str(tmp_path / "cache"))

    def files() -> set[str]:
        return {path.name for path in (tmp_path / "cache" / "packed").glob("*.bin")}

    load_model(folder, dtype="float32", device=CPU)
    whole = files()
    load_model(folder, dtype="float32", device=CPU, shard=shard(layout(), 0))
    assert files() == whole
    for cut in (layout(tp=2), layout(pp=2), layout(tp=2)):
        for rank in range(2):
            load_model(folder, dtype="float32", device=CPU, shard=shard(cut, rank))
    assert len(files()) == 5
    assert whole < files()


def write_gguf(path, storage, arch="llama"):
    """Query weights [4 heads * 8, 512] and an output projection [16, 512] whose blocks have 32 or 256 columns."""
    writer = gguf.GGUFWriter(path, arch)
    writer.add_head_count(4)
    writer.add_head_count_kv(4)
    generator = np.random.default_rng(0)
    writer.add_tensor("token_embd.weight", generator.normal(size=(4, 32)).astype(np.float32))
    for name, rows in (("attn_q", 32), ("attn_output", 16)):
        values = generator.normal(size=(rows, 512)).astype(np.float32)
        writer.add_tensor(f"blk.0.{name}.weight", gguf.quantize(values, storage), raw_dtype=storage)
    for write in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file):
        write()
    writer.close()
    return GgufSource(path)


QUERIES, OUT = "model.layers.0.self_attn.q_proj.weight", "model.layers.0.self_attn.o_proj.weight"


@pytest.mark.parametrize("storage", [Storage.F32, Storage.F16, Storage.BF16, Storage.Q8_0, Storage.Q4_1])
def test_parts_of_gguf_tensors(tmp_path, storage):
    source = write_gguf(tmp_path / "m.gguf", storage)
    heads = (range(8, 24), range(512))
    assert torch.equal(source.read(QUERIES, heads), source.read(QUERIES)[8:24])
    for columns in (range(64, 512), range(0, 64), range(40, 200)):
        part = (range(16), columns)
        assert torch.equal(source.read(OUT, part), source.read(OUT)[slices(part)])


def test_parts_of_blocks(tmp_path):
    source = write_gguf(tmp_path / "m.gguf", Storage.Q8_0)
    heads = source.read_blocks(QUERIES, (range(8, 24), range(512)))
    whole = source.read_blocks(QUERIES)
    assert heads is not None and whole is not None
    assert torch.equal(heads, whole[8:24])
    columns, whole = source.read_blocks(OUT, (range(16), range(64, 512))), source.read_blocks(OUT)
    assert columns is not None and whole is not None
    assert torch.equal(columns, whole[:, 2 * 34 :])
    assert source.read_blocks(OUT, (range(16), range(40, 512))) is None
