"""A small model's replicas are lost in the middle: every kind of sampling gives what it gives undisturbed."""

import asyncio
import re
import time

import pytest
import torch
import transformers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from migration_harness import MigratingCluster, check_whole, request
from openai_harness import byte_tokenizer
from polling import until
from sampled_requests import PARAMS, requests_with

from warmroot.actors.engine.config import EngineConfig
from warmroot.actors.engine.engine import Engine
from warmroot.actors.models.loader import load_model
from warmroot.actors.runner.guides import Guides
from warmroot.actors.runner.runner import ModelRunner
from warmroot.cluster.kv_layout import KvLayout
from warmroot.cluster.messages import FinishReason
from warmroot.cluster.output_grammar import OutputGrammar
from warmroot.kv_store.hashing import namespace_root

NUMBERS = OutputGrammar("regex", "([0-9]{3}[,;]){9}")
GRAMMAR = {"grammar": {"temperature": 0.8, "logprobs": 1, "ignore_eos": False, "grammar": NUMBERS}}
REQUESTS = requests_with(PARAMS | GRAMMAR)


@pytest.fixture(scope="module")
def make_engine(tmp_path_factory):
    """Engines over one small model."""
    torch.manual_seed(3)
    config = transformers.MistralConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        sliding_window=None,
        eos_token_id=2,
    )
    model = transformers.MistralForCausalLM(config).eval()
    for parameter in model.parameters():
        parameter.data.normal_(0.0, 0.3)
    folder = tmp_path_factory.mktemp("model")
    model.save_pretrained(folder)
    decoder = load_model(folder, dtype="float32", device=torch.device("cpu"))

    def make():
        guides = Guides(byte_tokenizer, 64, (2,))
        runner = ModelRunner(decoder, KvLayout.of(decoder.spec.layer_windows, 4), 400, guides=guides)
        limits = EngineConfig(max_model_len=256, max_num_seqs=16, eos_token_ids=(2,))
        return Engine(runner, limits, time.monotonic, namespace_root("small"))

    return make


def sources():
    return {name: request(name, prompt, **params) for name, (prompt, params) in REQUESTS.items()}


@pytest.fixture(scope="module")
def undisturbed(make_engine):
    """What one engine gives, by request."""
    engine, deltas = make_engine(), {name: [] for name in REQUESTS}
    for source in sources().values():
        engine.add(source)
    while engine.has_work:
        for delta in engine.step():
            deltas[delta.request_id].append(delta)
    assert engine.load().kv_used_blocks == 0
    return deltas


def test_the_grammar_is_kept(undisturbed):
    tokens = [token for delta in undisturbed["grammar"] for token in delta.token_ids]
    assert tokens.pop() == 2
    assert re.fullmatch(NUMBERS.text, bytes(tokens).decode())


def check_same(name, deltas, expected):
    """Tokens, their log-probabilities, those of the prompt, and how it ended."""
    assert check_whole(deltas, name) == [token for delta in expected for token in delta.token_ids]
    assert (deltas[-1].finish_reason, deltas[-1].stop_reason) == (expected[-1].finish_reason, expected[-1].stop_reason)
    assert same_logprobs(
        [entry for delta in deltas for entry in delta.logprobs or ()],
        [entry for delta in expected for entry in delta.logprobs or ()],
    )
    prompt = [delta.prompt_logprobs for delta in deltas if delta.prompt_logprobs is not None]
    wanted = [delta.prompt_logprobs for delta in expected if delta.prompt_logprobs is not None]
    assert len(prompt) == len(wanted)
    for ours, theirs in zip(prompt, wanted, strict=True):
        assert ours[0] is theirs[0] is None and same_logprobs(ours[1:], theirs[1:])


def same_logprobs(ours, theirs):
    assert [(entry.token_id, entry.rank) for entry in ours] == [(entry.token_id, entry.rank) for entry in theirs]
    return [entry.logprob for entry in ours] == pytest.approx([entry.logprob for entry in theirs], abs=1e-4)


async def serve_while(make_engine, losses):
    """All requests at once, while a replica is lost in a ``way`` whenever one more ``count`` tokens have come."""
    seen, names = 0, iter("bcdefghijklmnop")
    async with MigratingCluster("a", make_engine=make_engine, max_losses=100, wait_s=20.0) as cluster:
        deltas = {name: [] for name in REQUESTS}

        async def read(name, source):
            nonlocal seen
            async for delta in cluster.dispatcher.generate(source):
                deltas[name].append(delta)
                seen += len(delta.token_ids)

        async def lose():
            due = 0
            for count, way in losses:
                due += count
                await until(lambda due=due: seen >= due or all(task.done() for task in tasks))
                victim = next(replica for replica in cluster.replicas.values() if replica.alive)
                await cluster.start(next(names))
                getattr(victim, way)()

        tasks = [asyncio.ensure_future(read(name, source)) for name, source in sources().items()]
        await asyncio.gather(lose(), *tasks)
        await cluster.check_clean()
        return deltas, cluster.dispatcher.routing()


@pytest.mark.parametrize("way", ["kill", "fail", "hand_back"])
@pytest.mark.parametrize("count", [1, 10, 100, 200])
async def test_every_kind_of_request_outlives_its_replica(make_engine, undisturbed, count, way):
    deltas, stats = await serve_while(make_engine, [(count, way)])
    for name, expected in undisturbed.items():
        check_same(name, deltas[name], expected)
    assert sum(stats.migrations.values()) >= 1


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.integers(0, 90), st.sampled_from(["kill", "fail", "hand_back"])), max_size=5))
def test_whatever_happens_to_replicas_nobody_notices(make_engine, undisturbed, losses):
    deltas, _ = asyncio.run(serve_while(make_engine, losses))
    for name, expected in undisturbed.items():
        check_same(name, deltas[name], expected)


def test_the_requests_end_in_different_ways(undisturbed):
    ends = {name: deltas[-1].finish_reason for name, deltas in undisturbed.items()}
    assert set(ends.values()) == {FinishReason.STOP, FinishReason.LENGTH}
    assert undisturbed["logprobs"][0].prompt_logprobs is not None
