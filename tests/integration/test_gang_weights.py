"""Gangs of real processes take other weights: all ranks in the same step, or none."""

import time
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from warmroot.actors.engine.config import EngineConfig
from warmroot.actors.engine.engine import Engine
from warmroot.actors.engine.executor import Executor
from warmroot.actors.parallel.gang import start_gang
from warmroot.actors.parallel.gang_config import GangConfig
from warmroot.actors.parallel.spawn import RankProcesses
from warmroot.actors.runner.load import KvMemoryConfig, load_runner
from warmroot.cluster.errors import ConfigError, ModelLoadError
from warmroot.cluster.ids import RequestId
from warmroot.cluster.messages import GenerateRequest
from warmroot.cluster.sampling_params import SamplingParams
from warmroot.cluster.topology import Topology
from warmroot.cluster.weights_update import NewWeights
from warmroot.kv_store.hashing import namespace_root

PROMPT = torch.randint(4, 128, (40,), generator=torch.Generator().manual_seed(0)).tolist()
KV = KvMemoryConfig(block_size=4, num_kv_blocks=60)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    torch.manual_seed(3)
    config = transformers.LlamaConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        eos_token_id=2,
    )
    model = transformers.LlamaForCausalLM(config).eval()
    paths: list[Path] = []
    for name in ("old", "new"):
        for parameter in model.parameters():
            parameter.data.normal_(0.0, 0.2)
        paths.append(tmp_path_factory.mktemp(name))
        model.save_pretrained(paths[-1])
    return paths[0], paths[1]


def start_engine(executor: Executor) -> Engine:
    config = EngineConfig(max_model_len=100, max_num_seqs=8, max_num_batched_tokens=16)
    return Engine(executor, config, time.monotonic, namespace_root("m", "old"), weights_version="old")


def generate(engine: Engine, round_: str) -> dict[int, list[int]]:
    tokens: dict[int, list[int]] = {}
    for number in range(4):
        params = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
        name = RequestId(f"{round_}-{number}")
        engine.add(GenerateRequest(request_id=name, prompt_token_ids=PROMPT[: 9 + 5 * number], params=params))
    while engine.has_work:
        for delta in engine.step():
            assert delta.error is None, delta.error
            tokens.setdefault(int(delta.request_id[-1]), []).extend(delta.token_ids)
    return tokens


@pytest.mark.parametrize("sizes", [{"tp": 2}, {"pp": 2}], ids=str)
def test_all_ranks_change_together_or_none_does(folders, tmp_path: Path, sizes: dict[str, int]):
    expected = [generate(start_engine(load_runner(folder, dtype="float32", kv=KV)), folder.name) for folder in folders]
    assert expected[0] != expected[1]
    topology = Topology(**sizes)
    config = GangConfig(path=folders[0], topology=topology, kv=KV, threads_per_rank=1, dtype="float32", step_s=100.0)
    gang = start_gang(RankProcesses(config))
    try:
        engine = start_engine(gang)
        assert generate(engine, "a") == expected[0]
        assert gang.prepare(NewWeights(version="new", model=str(folders[1]))) == gang.reports[0].weights_format
        assert generate(engine, "b") == expected[0]
        assert len(gang.times()) == topology.world_size
        engine.adopt("new", namespace_root("m", "new"))
        assert generate(engine, "c") == expected[1]
        with pytest.raises(ModelLoadError, match=r"layers\.2.*not finite"):
            gang.prepare(NewWeights(version="bad", model=str(spoilt_in_the_last_layer(folders[0], tmp_path))))
        gang.discard()
        assert generate(engine, "d") == expected[1]
        with pytest.raises(ConfigError, match="need ranks that are Ray actors"):
            gang.prepare(NewWeights(version="bad", actor="a"))
        assert engine.weights_version == "new"
    finally:
        gang.shutdown()


def spoilt_in_the_last_layer(source: Path, folder: Path) -> Path:
    """So that with two stages only one rank finds out."""
    tensors = load_file(source / "model.safetensors")
    tensors["model.layers.2.mlp.down_proj.weight"][0, 0] = float("nan")
    (folder / "config.json").write_text((source / "config.json").read_text())
    save_file(tensors, folder / "model.safetensors")
    return folder
