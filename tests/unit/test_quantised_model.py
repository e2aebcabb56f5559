"""Quantised KV of a whole model: SmolLM2 by the public class, and what is refused."""

from types import SimpleNamespace
from typing import cast

import pytest
import torch

from warmroot import SamplingParams
from warmroot.actors.engine_host import EngineHost
from warmroot.actors.models.decoder import Decoder
from warmroot.actors.models.source import resolve_model
from warmroot.actors.runner.load import KvMemoryConfig, kv_memory_for, load_runner
from warmroot.actors.runner.memory import open_page_bytes, page_bytes
from warmroot.cluster.config import WarmrootConfig
from warmroot.cluster.errors import ConfigError
from warmroot.cluster.ids import Epoch, ReplicaId
from warmroot.cluster.kv_formats import KV_FORMATS
from warmroot.cluster.kv_layout import KvLayout
from warmroot.cluster.model_spec import MlaSpec
from warmroot.deploy.bench.kv import main
from warmroot.deploy.llm import LLM

PROMPT = "The capital of France is"


@pytest.mark.model
@pytest.mark.parametrize("fmt", ["fp8", "int8", "int4", "k8v4"])
def test_answers_with_every_format(fmt):
    greedy = SamplingParams(temperature=0.0, max_tokens=8)
    llm = LLM("smollm2", kv_cache_dtype=fmt, num_kv_blocks=20, max_model_len=256)
    first, again = (llm.generate([PROMPT], greedy)[0].text for _ in range(2))
    assert first == again and "Paris" in first


@pytest.mark.model
def test_drafts_change_nothing_in_fp8():
    greedy, kv = SamplingParams(temperature=0.0, max_tokens=30), {"kv_cache_dtype": "fp8", "num_kv_blocks": 60}
    prompts = [PROMPT, "Days of the week: Monday, Tuesday, Wednesday,", "Once upon a time there was a"]
    plain = LLM("smollm2", max_model_len=256, **kv).generate(prompts, greedy)
    for method in ("layer_skip", "ngram"):
        speculation = {"method": method, "num_speculative_tokens": 3, "adaptive": False}
        drafting = LLM("smollm2", max_model_len=256, speculative_config=speculation, **kv)
        assert [answer.text for answer in drafting.generate(prompts, greedy)] == [answer.text for answer in plain]


@pytest.mark.model
def test_memory_is_what_is_said():
    kv = KvMemoryConfig(kv_cache_dtype="int8", kv_cache_memory=2**22)
    runner = load_runner(resolve_model("smollm2"), kv=kv)
    size = page_bytes(runner.decoder.spec, runner.layout, runner.kv_dtype)
    allocated = sum(pages.nbytes for pages in (*runner._kv.keys, *runner._kv.values))
    assert size == 30 * 3 * (16 * 64 + 2 * 64 + 8 + 16 * (64 + 3))
    # So few pages may all be open at a time.
    open_size = open_page_bytes(runner.decoder.spec, runner.layout, runner.kv_dtype)
    assert open_size == 30 * 3 * 2 * 64 * 16
    assert allocated == runner.num_blocks * size
    assert runner.num_blocks == 2**22 // (size + open_size)
    assert str(runner.kv_dtype) == "int8"
    assert runner._kv.keys[0].open_pages.dtype == torch.float16


def test_models_that_cache_latents_refuse():
    mla = MlaSpec(q_lora_rank=None, kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=16)
    decoder = SimpleNamespace(spec=SimpleNamespace(mla=mla))
    layout = KvLayout.of((None,), 16)
    with pytest.raises(ConfigError, match="kv_cache_dtype: int8 needs keys and values"):
        kv_memory_for(cast(Decoder, decoder), layout, KvMemoryConfig(kv_cache_dtype="int8"), None, 1)


@pytest.mark.model
def test_the_bench_runs(capsys):
    assert main(["--quick", "--json", "--threads", "1"]) == 0
    assert '"bench":"kv"' in capsys.readouterr().out


@pytest.mark.model
def test_memory_of_fp8():
    """No page is open beside the others."""
    runner = load_runner(resolve_model("smollm2"), kv=KvMemoryConfig(kv_cache_dtype="fp8", kv_cache_memory=2**22))
    size = page_bytes(runner.decoder.spec, runner.layout, runner.kv_dtype)
    assert size == 30 * 3 * 16 * 2 * (64 + 2)
    assert runner.num_blocks == 2**22 // size
    assert runner.num_blocks * size == sum(pages.nbytes for pages in (*runner._kv.keys, *runner._kv.values))


def test_fp8_is_e4m3():
    assert WarmrootConfig.of("smollm2", kv_cache_dtype="fp8_e4m3").cache.kv_cache_dtype == "fp8"
    with pytest.raises(ConfigError, match="kv_cache_dtype: fp8_e5m2 is not supported; fp8 is e4m3"):
        WarmrootConfig.of("smollm2", kv_cache_dtype="fp8_e5m2")


def test_fp8_needs_gpus_that_have_it(monkeypatch):
    device = torch.device("cuda")
    spec = SimpleNamespace(mla=None, max_position=64, cache_heads=2, cache_dim=8)
    decoder = cast(Decoder, SimpleNamespace(spec=spec, device=device))
    kv, layout = KvMemoryConfig(kv_cache_dtype="fp8", num_kv_blocks=9), KvLayout.of((None,), 16)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 6))
    with pytest.raises(ConfigError, match=r"kv_cache_dtype: fp8 needs a GPU of compute capability 8\.9 or more"):
        kv_memory_for(decoder, layout, kv, None, 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert kv_memory_for(decoder, layout, kv, None, 1) == (KV_FORMATS["fp8"], 9)


@pytest.mark.model
def test_routers_are_told_of_a_namespace_for_each_format():
    infos = []
    for fmt in ("fp16", "fp8", "int8", "k8v4"):
        config = WarmrootConfig.of("smollm2", kv_cache_dtype=fmt, num_kv_blocks=20, max_model_len=128)
        host = EngineHost.load(config, lambda *_: None)
        infos.append(host.describe(ReplicaId("a"), Epoch(1), "", node="", pid=0))
        host.model.executor.shutdown()
    assert [info.kv_format for info in infos] == ["fp16", "fp8", "int8", "k8v4"]
    assert len({info.kv_namespace for info in infos}) == 4
