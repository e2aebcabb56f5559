"""What is counted, by whom, and how it is exported."""

import msgpack
import pytest
from bus_contract import replica_info
from engine_deployment import Deployment
from engine_harness import Harness
from manual_clock import ManualClock
from openai_harness import Rig, says
from prometheus_client.parser import text_string_to_metric_families

from warmroot.cluster.engine_counts import EngineCounts, together
from warmroot.cluster.histogram import Histogram, merged
from warmroot.cluster.ids import Epoch, ReplicaId
from warmroot.cluster.messages import FirstTokenReport, RankInfo
from warmroot.kv_store.bus import InMemoryBus
from warmroot.kv_store.events import CacheCleared, KvEventBatch, decode, encode
from warmroot.kv_store.index import PrefixIndex
from warmroot.router.bus_follower import BusFollower
from warmroot.router.metrics import KEPT_SCRAPES, RequestMetrics
from warmroot.router.openai.cluster_state import DECISION_S, ReplicaState, RoutingStats
from warmroot.router.several_models import SeveralModels

REPLICA = {"model_name": "org/tiny", "engine": "r0"}


def samples(text: str) -> dict[tuple, float]:
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


async def scraped(rig: Rig) -> dict[tuple, float]:
    async with rig.http() as client:
        return samples((await client.get("/metrics")).text)


def key(name: str, **labels: str) -> tuple:
    return name, tuple(sorted(labels.items()))


def test_a_histogram_counts_under_its_bounds():
    histogram = Histogram((1.0, 2.5, 5.0))
    for value in (0.5, 1.0, 2.6, 7.0):
        histogram.observe(value)
    counts = histogram.counts()
    assert counts.buckets() == [("1.0", 2), ("2.5", 2), ("5.0", 3), ("+Inf", 4)]
    assert (counts.num_values, counts.total) == (4, 11.1)
    both = merged((1.0, 2.5, 5.0), (counts, counts))
    assert (both.counts, both.total) == ((4, 0, 2, 2), 22.2)
    assert merged((1.0,), ()).buckets() == [("1.0", 0), ("+Inf", 0)]


def test_an_engine_counts_what_it_does_and_tells_where_the_time_went():
    h = Harness(num_blocks=40)
    h.clock.now = 10.0
    h.add("a", [0, 1, 2, 0, 2], max_tokens=3)
    h.clock.now = 12.0
    h.engine.begin_all()
    h.clock.now = 12.5
    (first,) = h.engine.end(h.executor.result())
    assert first.report == FirstTokenReport(queue_s=2.0, prefill_s=0.5)
    (second,) = h.engine.step()
    assert second.report is None
    h.engine.step()
    counts = h.engine.counts()
    assert counts.generation_tokens == 3
    assert (counts.steps.num_values, counts.steps.total) == (3, 5 + 1 + 1)
    assert counts.steps.buckets()[:4] == [("1.0", 2), ("2.0", 2), ("4.0", 2), ("8.0", 3)]
    assert counts.busy_s == 0.5
    assert (counts.preemptions, counts.evicted_blocks) == (0, 0)
    assert counts.cached_blocks == 1


def test_preemptions_and_evictions_are_counted():
    h = Harness(num_blocks=9, max_model_len=32)
    h.add("a", [0, 1, 2, 0] * 3, max_tokens=16)
    h.add("b", [2, 1, 2, 0] * 3, max_tokens=16)
    h.run()
    counts = h.engine.counts()
    assert counts.preemptions > 0
    assert counts.evicted_blocks > 0
    assert counts.generation_tokens == 32


def test_counts_of_groups_that_step_together():
    one = EngineCounts(busy_s=2.0, generation_tokens=3, preemptions=1, evicted_blocks=4, cached_blocks=5)
    other = EngineCounts(busy_s=1.5, generation_tokens=4)
    both = together([one, other])
    assert (both.busy_s, both.generation_tokens, both.preemptions, both.evicted_blocks) == (2.0, 7, 1, 4)
    assert both.cached_blocks == 5


async def test_a_request_s_time_has_parts_and_its_tokens_sources():
    report = FirstTokenReport(queue_s=0.3, prefill_s=0.7, router_s=0.1, predicted_tokens=4)
    rig = Rig(says("Hello!", cached_tokens=4, report=report))
    await rig.complete("abcdefgh", max_tokens=4, n=1)
    found = await scraped(rig)
    assert found[key("vllm:request_queue_time_seconds_sum", **REPLICA)] == 0.3
    assert found[key("vllm:request_prefill_time_seconds_sum", **REPLICA)] == 0.7
    assert found[key("vllm:request_inference_time_seconds_sum", **REPLICA)] >= 0.7
    assert found[key("vllm:request_decode_time_seconds_count", **REPLICA)] == 1
    assert found[key("vllm:request_time_per_output_token_seconds_count", **REPLICA)] == 1
    assert found[key("vllm:request_prompt_tokens_sum", **REPLICA)] == 8
    assert found[key("vllm:request_generation_tokens_sum", **REPLICA)] == 4
    assert found[key("vllm:request_prefill_kv_computed_tokens_sum", **REPLICA)] == 4
    assert found[key("vllm:request_params_n_sum", **REPLICA)] == 1
    assert found[key("vllm:request_params_max_tokens_sum", **REPLICA)] == 4
    assert found[key("vllm:prompt_tokens_by_source_total", source="local_compute", **REPLICA)] == 4
    assert found[key("vllm:prompt_tokens_by_source_total", source="local_cache_hit", **REPLICA)] == 4


async def test_what_a_replica_says_of_itself():
    rig = Rig()
    steps = Histogram(EngineCounts().steps.bounds)
    steps.observe(3)
    rig.cluster.counts = EngineCounts(
        steps=steps.counts(), busy_s=1.5, generation_tokens=9, preemptions=2, evicted_blocks=3, cached_blocks=4
    )
    found = await scraped(rig)
    assert found[key("vllm:num_preemptions_total", **REPLICA)] == 2
    assert found[key("vllm:iteration_tokens_total_bucket", le="4.0", **REPLICA)] == 1
    assert found[key("vllm:iteration_tokens_total_sum", **REPLICA)] == 3
    assert found[key("warmroot:replica_busy_seconds_total", **REPLICA)] == 1.5
    assert found[key("warmroot:replica_generation_tokens_total", **REPLICA)] == 9
    assert found[key("warmroot:replica_evicted_blocks_total", **REPLICA)] == 3
    assert found[key("warmroot:replica_cached_blocks", **REPLICA)] == 4


async def test_what_a_router_has_decided():
    rig = Rig()
    decisions = Histogram(DECISION_S)
    decisions.observe(0.0002)
    rig.cluster.stats = RoutingStats(
        decision_s=decisions.counts(),
        colder_choices=3,
        reservations=2,
        reserved_tokens=64,
        joined={"gang": 2},
        gone={"gang": 1},
    )
    found = await scraped(rig)
    assert found[key("warmroot:routing_decision_seconds_bucket", le="0.00025")] == 1
    assert found[key("warmroot:routing_decision_seconds_bucket", le="0.0001")] == 0
    assert found[key("warmroot:routing_colder_choices_total")] == 3
    assert found[key("warmroot:reservations")] == 2
    assert found[key("warmroot:reserved_tokens")] == 64
    assert found[key("warmroot:replicas_joined_total", kind="gang")] == 2
    assert found[key("warmroot:replicas_joined_total", kind="single")] == 0
    assert found[key("warmroot:replicas_gone_total", kind="gang")] == 1
    assert found[key("warmroot:event_lag_seconds_count")] == 0
    assert found[key("warmroot:migrations_total", reason="silence")] == 0


async def test_how_late_events_come():
    bus = InMemoryBus(ManualClock(), "bus")
    await bus.heartbeat(replica_info("a"), 1000.0)
    follower = BusFollower(bus, PrefixIndex(), lambda infos: None, wall=lambda: 12.5)
    for seq, sent_at in enumerate((10.0, 12.4, 99.0, 0.0)):  # the third one's clock is ahead
        batch = KvEventBatch(ReplicaId("a"), Epoch(1), seq, (CacheCleared(),), sent_at)
        assert decode(encode(batch)) == batch
        await bus.publish(ReplicaId("a"), Epoch(1), [encode(batch)])
    await follower.follow_once(0.0)
    lag = follower.event_lag_s.counts()
    assert lag.num_values == 3
    assert lag.total == pytest.approx(2.6)


def test_batches_of_a_replica_that_stamps_none_are_read():
    five_fields = msgpack.packb([1, "a", 1, 0, [["cleared"]]])
    assert decode(five_fields) == KvEventBatch(ReplicaId("a"), Epoch(1), 0, (CacheCleared(),))


async def test_several_ingresses_count_apart_and_tell_the_same_of_replicas():
    first, second = Rig(num_ingress=2, ingress="a"), Rig(num_ingress=2, ingress="b")
    await first.chat()
    await second.chat()
    await second.chat()
    one, other = await scraped(first), await scraped(second)
    ended = "vllm:request_success_total"
    assert one[key(ended, finished_reason="stop", ingress="a", **REPLICA)] == 1
    assert other[key(ended, finished_reason="stop", ingress="b", **REPLICA)] == 2
    assert one[key("warmroot:queued_requests", ingress="a")] == 0
    same = key("vllm:num_requests_running", **REPLICA)
    assert one[same] == other[same] == 3
    apart = {name for name, labels in {**one, **other} if ("engine", "r0") in labels} - {
        name for name, labels in {**one, **other} if "ingress" in dict(labels)
    }
    both = {name for name, labels in one if "ingress" in dict(labels)} & apart
    assert not both, "a metric is either of the ingress or of the replica"
    assert not [name for name, _ in one if name.endswith("_created")]


async def test_replicas_that_are_gone_are_forgotten():
    rig = Rig(says("x", replica="old"))  # the cluster knows r0 only
    await rig.chat()
    gone = {"model_name": "org/tiny", "engine": "old"}
    for _ in range(KEPT_SCRAPES):
        found = await scraped(rig)
    assert found[key("vllm:request_success_total", finished_reason="stop", **gone)] == 1
    assert not [name for name, labels in await scraped(rig) if ("engine", "old") in labels]
    await rig.chat()
    assert (await scraped(rig))[key("vllm:request_success_total", finished_reason="stop", **gone)] == 1


async def test_responses_are_counted_by_routes_that_exist():
    rig = Rig()
    await rig.chat()
    async with rig.http() as client:
        for path in ("/v1/models/tiny", "/v1/models/nope", "/secret/1", "/secret/2"):
            await client.get(path)
    found = await scraped(rig)
    name = "warmroot:http_responses_total"
    assert found[key(name, route="/v1/chat/completions", status="200")] == 1
    assert found[key(name, route="/v1/models/{model:path}", status="200")] == 1
    assert found[key(name, route="/v1/models/{model:path}", status="404")] == 1
    assert found[key(name, route="other", status="404")] == 2


@pytest.mark.parametrize("cached", [9, 3, 0])
async def test_more_cached_than_asked_harms_no_request(cached):
    rig = Rig(says("ok", cached_tokens=cached))
    assert (await rig.complete("abc")).status_code == 200
    computed = (await scraped(rig))[key("vllm:prompt_tokens_by_source_total", source="local_compute", **REPLICA)]
    assert computed == max(0, 3 - cached)


def test_a_model_without_replicas_is_there():
    deployment = Deployment()
    deployment.membership.model = "m"
    found = samples(RequestMetrics(SeveralModels([Rig().cluster, deployment.dispatcher])).exposition().decode())
    assert found[key("warmroot:replicas", model_name="org/tiny", state="ready")] == 1
    assert [found[key("warmroot:replicas", model_name="m", state=state.value)] for state in ReplicaState] == [0] * 4


def test_ranks_of_gangs():
    class Gang:
        def __init__(self, rig: Rig) -> None:
            self.rig = rig

        def __getattr__(self, name):
            return getattr(self.rig.cluster, name)

        def replicas(self):
            from dataclasses import replace

            (one,) = self.rig.cluster.replicas()
            ranks = tuple(
                RankInfo(rank=rank, stage=0, host="h", pid=1, memory_bytes=100 + rank, last_step=7) for rank in (0, 1)
            )
            return [replace(one, info=replace(one.info, ranks=ranks))]

    found = samples(RequestMetrics(SeveralModels([Gang(Rig())])).exposition().decode())
    assert found[key("warmroot:gang_ranks", **REPLICA)] == 2
    assert found[key("warmroot:rank_memory_bytes", rank="1", **REPLICA)] == 101
    assert found[key("warmroot:rank_steps_total", rank="0", **REPLICA)] == 7
