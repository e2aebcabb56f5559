"""Client handles: the cluster from Python, without HTTP."""

import asyncio
from collections.abc import Iterator

import pytest
import ray

import warmroot
from warmroot.cluster.errors import ConfigError, ContextTooLongError, InvalidRequestError, ReplicaUnavailableError

from .cluster_harness import Cluster

pytestmark = [pytest.mark.cluster, pytest.mark.model]

PROMPT = "The capital of France is"
MESSAGES = [{"role": "user", "content": "Name three colours."}]
GREEDY = warmroot.SamplingParams(max_tokens=8, temperature=0)
ENDLESS = warmroot.SamplingParams(max_tokens=900, ignore_eos=True)


@pytest.fixture(scope="module")
def handle(cluster: Cluster) -> Iterator[warmroot.Handle]:
    with warmroot.connect() as handle:
        yield handle


async def test_generate(handle: warmroot.Handle):
    output = await handle.generate(PROMPT, GREEDY)
    assert output.text.startswith(" Paris")
    assert (output.num_prompt_tokens, output.num_output_tokens) == (5, 8)
    assert output.replica in {replica.info.replica for replica in handle.replicas()}
    assert handle.model == "smollm2"


async def test_every_form_says_the_same(handle: warmroot.Handle):
    output = await handle.generate(PROMPT, GREEDY)
    assert (await handle.generate(output.prompt_token_ids, GREEDY)).text == output.text
    assert (await asyncio.to_thread(handle.generate_sync, PROMPT, GREEDY)).text == output.text
    assert "".join([delta.text async for delta in handle.stream(PROMPT, GREEDY)]) == output.text
    assert "".join(delta.text for delta in handle.stream_sync(PROMPT, GREEDY)) == output.text


def test_a_conversation_stays_warm(handle: warmroot.Handle):
    first = handle.generate_sync(MESSAGES, GREEDY)
    turns = [*MESSAGES, {"role": "assistant", "content": first.text}, {"role": "user", "content": "And three more?"}]
    second = handle.generate_sync(turns, GREEDY)
    assert second.cached_tokens >= len(first.prompt_token_ids) // 16 * 16
    assert second.replica == first.replica


async def test_many_at_once(handle: warmroot.Handle):
    outputs = await asyncio.gather(*[handle.generate(f"{number} and", GREEDY) for number in range(40)])
    assert [output.num_output_tokens for output in outputs] == [8] * 40
    assert len({output.replica for output in outputs}) == 2


async def test_closing_a_stream_frees_its_blocks(cluster: Cluster, handle: warmroot.Handle):
    stream = handle.stream(PROMPT, ENDLESS)
    await anext(stream)
    await stream.aclose()
    cluster.wait_idle()


async def test_leaving_a_stream_by_an_error_frees_its_blocks(cluster: Cluster, handle: warmroot.Handle):
    with pytest.raises(RuntimeError, match="enough"):
        async for _ in handle.stream(PROMPT, ENDLESS):
            raise RuntimeError("enough")
    cluster.wait_idle()


def test_closing_a_synchronous_stream_frees_its_blocks(cluster: Cluster, handle: warmroot.Handle):
    stream = handle.stream_sync(PROMPT, ENDLESS)
    next(stream)
    stream.close()
    cluster.wait_idle()


async def test_cancelling_the_caller_frees_its_blocks(cluster: Cluster, handle: warmroot.Handle):
    task = asyncio.create_task(handle.generate(PROMPT, ENDLESS))
    await asyncio.sleep(0.3)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    cluster.wait_idle()


def test_closing_a_handle_ends_what_it_runs(cluster: Cluster):
    with warmroot.connect("smollm2") as handle:
        stream = handle.stream_sync(PROMPT, ENDLESS)
        next(stream)
    with pytest.raises(RuntimeError, match="closed"):
        next(stream)
    with pytest.raises(RuntimeError, match="closed"):
        handle.generate_sync(PROMPT, GREEDY)
    cluster.wait_idle()


def test_what_cannot_be_served(handle: warmroot.Handle):
    with pytest.raises(ContextTooLongError, match="1024"):
        handle.generate_sync("word " * 3000, GREEDY)
    with pytest.raises(InvalidRequestError):
        handle.generate_sync([1, 10**6], GREEDY)
    with pytest.raises(InvalidRequestError):
        handle.generate_sync("", GREEDY)
    with pytest.raises(ReplicaUnavailableError, match="other"):
        warmroot.connect("other", timeout_s=0.5)


def test_a_task_of_the_same_ray_connects(cluster: Cluster):
    @ray.remote(num_cpus=0)
    def ask() -> str:
        with warmroot.connect() as handle:
            return handle.generate_sync(PROMPT, GREEDY).text

    assert ray.get(ask.remote(), timeout=120) == cluster.handle.generate_sync(PROMPT, GREEDY).text


def test_a_program_without_warmroot(monkeypatch: pytest.MonkeyPatch, cluster: Cluster):
    monkeypatch.setattr("warmroot.deploy.handle.find_bus", lambda: None)
    with pytest.raises(ConfigError, match="not running"):
        warmroot.connect()
