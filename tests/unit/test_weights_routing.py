"""A request that moves goes on with the weights that it began with, or says that it does not."""

import asyncio
import time
from dataclasses import replace

from engine_harness import ScriptedExecutor
from migration_harness import BLOCK, VOCAB, EngineReplica, MigratingCluster, check_whole, request
from polling import until

from warmroot.actors.engine.config import EngineConfig
from warmroot.actors.engine.engine import Engine
from warmroot.cluster.errors import InvalidRequestError, WarmrootError
from warmroot.cluster.kv_layout import KvLayout
from warmroot.kv_store.hashing import namespace_root


async def start(cluster: MigratingCluster, name: str, version: str, **options) -> EngineReplica:
    executor = ScriptedExecutor(KvLayout.of((None,), BLOCK), num_blocks=400, vocab_size=VOCAB)
    namespace = namespace_root("m", version)
    config = EngineConfig(max_model_len=1024, max_num_seqs=16, max_num_batched_tokens=64)
    engine = Engine(executor, config, time.monotonic, namespace, weights_version=version)
    replica = EngineReplica(name, cluster.bus, engine, **options)
    replica.info = replace(replica.info, kv_namespace=namespace, weights_version=version)
    cluster.started.append(replica)
    cluster.replicas[name] = replica
    await replica.start()
    await until(lambda: name in {member.info.replica for member in cluster.membership.ready()})
    return replica


async def moved(others: dict[str, str]) -> tuple[list[str], list[str]]:
    """Replicas and versions of a request that begins on a replica of version 1, which hands it back after 4 tokens."""
    all_here = asyncio.Event()
    async with MigratingCluster() as cluster:

        def hand_back(replica: EngineReplica) -> None:
            if replica.sent.get("r", 0) >= 4 and all_here.is_set():
                replica.hand_back()

        first = await start(cluster, "first", "1", on_step=hand_back)
        first.step_s = 0.005
        task = asyncio.ensure_future(cluster.run(request("r", max_tokens=200)))
        await until(lambda: first.sent.get("r", 0) > 0)
        for name, version in others.items():
            await start(cluster, name, version)
        all_here.set()
        deltas = await task
        check_whole(deltas)
        told = [delta for delta in deltas if delta.replica is not None]
        return [str(delta.replica) for delta in told], [
            delta.weights_version for delta in deltas if delta.weights_version is not None
        ]


async def test_it_goes_on_where_the_weights_are_the_same():
    for _ in range(3):
        assert await moved({"a": "2", "b": "1", "c": "2"}) == (["first", "b"], ["1", "1"])


async def test_where_there_are_no_such_weights_it_goes_on_and_says_so():
    assert await moved({"a": "2"}) == (["first", "a"], ["1", "2"])


async def test_a_replica_that_has_changed_is_known_by_its_new_namespace():
    async with MigratingCluster() as cluster:
        replica = await start(cluster, "a", "1")
        await cluster.run(request("r", max_tokens=2))
        namespace = namespace_root("m", "2")
        replica.engine.adopt("2", namespace)
        replica.info = replace(replica.info, kv_namespace=namespace, weights_version="2")
        await cluster.bus.heartbeat(replica.info, 600.0)
        await until(lambda: cluster.membership.ready()[0].info.weights_version == "2")
        deltas = await cluster.run(request("s", max_tokens=2))
        assert deltas[0].weights_version == "2"
        assert (namespace, BLOCK) in cluster.dispatcher.core.fleet.caches
        assert len(cluster.dispatcher.core.fleet.caches) == 1


async def test_replicas_answer_what_they_are_asked_over_the_channel():
    async with MigratingCluster() as cluster:
        replica = await start(cluster, "a", "1")
        [member] = cluster.membership.leased()
        error = await failed(member.client.ask("adopt_weights", {}, 10.0))
        assert "not ready for adopt_weights" in str(error)

        async def answer(what: str, arguments) -> dict:
            if what == "refuse":
                raise InvalidRequestError("no", param="x")
            if what == "break":
                raise ValueError("oops")
            if what == "sleep":
                await asyncio.sleep(60)
            return {"what": what, **arguments}

        replica.server.answerer = answer
        both = await asyncio.gather(*(member.client.ask("echo", {"n": n}, 10.0) for n in range(2)))
        assert both == [{"what": "echo", "n": 0}, {"what": "echo", "n": 1}]
        refused = await failed(member.client.ask("refuse", {}, 10.0))
        assert (type(refused).__name__, refused.param) == ("InvalidRequestError", "x")
        assert "ValueError: oops" in str(await failed(member.client.ask("break", {}, 10.0)))
        assert "within 0.05 s" in str(await failed(member.client.ask("sleep", {}, 0.05)))
        asked = asyncio.ensure_future(member.client.ask("sleep", {}, 60.0))
        await asyncio.sleep(0.05)
        replica.kill()
        assert "lost the connection" in str(await failed(asked))


async def failed(asked) -> WarmrootError:
    try:
        await asked
    except WarmrootError as error:
        return error
    raise AssertionError("it did not fail")
