"""The clock that parts a decode step into kernels and the rest."""

import time

import pytest

from warmroot.actors.engine.config import EngineConfig
from warmroot.actors.engine.engine import Engine
from warmroot.actors.models.source import resolve_model
from warmroot.actors.runner.load import KvMemoryConfig, load_runner
from warmroot.cluster.ids import BlockHash, RequestId
from warmroot.cluster.messages import GenerateRequest
from warmroot.cluster.sampling_params import SamplingParams
from warmroot.deploy.bench.peers.step_cost import measure_steps

pytestmark = pytest.mark.model


def test_the_kernels_are_most_of_a_step_and_the_decoder_is_put_back():
    runner = load_runner(resolve_model("smollm2"), kv=KvMemoryConfig(num_kv_blocks=40))
    decoder = runner.decoder
    config = EngineConfig(
        max_model_len=256, max_num_seqs=2, max_num_batched_tokens=64, eos_token_ids=(), vocab_size=49152
    )
    engine = Engine(runner, config, time.monotonic, BlockHash(bytes(16)))
    engine.add(
        GenerateRequest(
            request_id=RequestId("a"),
            prompt_token_ids=[1, 2, 3],
            params=SamplingParams(temperature=0.0, max_tokens=100, ignore_eos=True),
        )
    )
    cost = measure_steps(engine, runner, 4)
    assert runner.decoder is decoder
    # The forward pass is within the clock: without it the head alone would count, a fifth of the model.
    assert cost["kernels_s"] > cost["overhead_s"]
    assert cost["steps"] == 4
