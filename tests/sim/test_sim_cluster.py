"""Whole simulations: the production router before simulated replicas."""

import json
import random

import pytest

from warmroot.cluster.errors import ConfigError
from warmroot.deploy.cli import main as cli
from warmroot.deploy.simulate.cluster import SimulatedCluster, simulate
from warmroot.deploy.simulate.costs import ReplicaCosts
from warmroot.deploy.simulate.generators import GENERATORS
from warmroot.deploy.simulate.scenario import POLICY_NAMES, load_trace, scaled, setup_of
from warmroot.deploy.simulate.trace import Trace, TraceRequest, ideal_hit_rate, read_trace, spread, superpose


@pytest.fixture(scope="module")
def traffic():
    return scaled(load_trace("agent", 300, 3), 4, 0.5, ReplicaCosts())


def run(traffic, policy, **options):
    return simulate(traffic, setup_of(policy, 4, traffic, **options)).summary()


@pytest.mark.parametrize("policy", POLICY_NAMES)
def test_every_policy_serves_everyone(traffic, policy):
    cluster = SimulatedCluster(traffic, setup_of(policy, 4, traffic))
    summary = cluster.run().summary()
    assert summary["requests"] == 300
    assert all(router.core.num_waiting == 0 for router in cluster._routers)
    assert all(replica.num_requests == 0 and replica.cache.active == 0 for replica in cluster._replicas.values())
    for name in cluster._replicas:
        assert cluster._routers[0].core.in_flight.unfinished(name) == 0


def test_a_simulation_repeats_itself(traffic):
    assert run(traffic, "warm_prefix", seed=5) == run(traffic, "warm_prefix", seed=5)


def test_prefixes_are_found_where_they_are(traffic):
    blind, warm, ideal = run(traffic, "round_robin"), run(traffic, "warm_prefix"), ideal_hit_rate(traffic)
    assert blind["hit_rate"] < 0.85 * warm["hit_rate"] and 0.85 * ideal < warm["hit_rate"] <= ideal
    assert warm["predicted_over_actual_hits"] == pytest.approx(1.0, abs=0.1)


def test_the_index_is_what_the_replicas_hold(traffic):
    cluster = SimulatedCluster(traffic, setup_of("warm_prefix", 4, traffic, event_lag_s=0.0))
    cluster.run()
    for name, replica in cluster._replicas.items():
        assert cluster._routers[0].index.blocks_of(name) == len(replica.cache.chains())


def test_several_routers_find_as_much_as_one():
    # Of the first few hundred requests, on cold replicas, they find less: no router sees all that is being computed.
    warm = scaled(load_trace("agent", 1200, 3), 4, 0.5, ReplicaCosts())
    one, four = run(warm, "warm_prefix"), run(warm, "warm_prefix", num_routers=4)
    assert four["requests"] == 1200
    assert four["hit_rate"] > one["hit_rate"] - 0.01


def test_requests_of_a_dead_replica_are_served_elsewhere(traffic):
    busy = scaled(load_trace("agent", 300, 3), 4, 2.0, ReplicaCosts())
    middle = busy.requests[150].arrival_s
    cluster = SimulatedCluster(busy, setup_of("warm_prefix", 4, busy, kill_at=middle))
    summary = cluster.run().summary()
    assert summary["requests"] == 300 and summary["resubmitted"] > 0
    assert all(router.core.num_waiting == 0 for router in cluster._routers)


def test_an_absent_bus_costs_hits_and_nothing_else(traffic):
    span = traffic.requests[100].arrival_s, traffic.requests[200].arrival_s
    cluster = SimulatedCluster(traffic, setup_of("warm_prefix", 4, traffic, bus_down=span, event_lag_s=0.0))
    assert cluster.run().summary()["requests"] == 300
    for name, replica in cluster._replicas.items():
        assert cluster._routers[0].index.blocks_of(name) == len(replica.cache.chains())


def test_the_mocker_s_round_robin_is_met():
    """Dynamo's own simulator, 8 replicas at the recorded rate: see docs/simulator.md. Here: every request alone."""
    trace = Trace("t", [TraceRequest(100.0 * n, 12000, 100, tuple(range(24 * n, 24 * n + 24))) for n in range(8)])
    summary = run(trace, "round_robin")
    costs = ReplicaCosts()
    assert summary["ttft_mean_s"] == pytest.approx(costs.prefill_s(8192) + costs.prefill_s(12000 - 8192))
    assert summary["hit_rate"] == 0.0


def test_generators_have_prefixes_and_repeat():
    for make in GENERATORS.values():
        trace = make(500, 1)
        assert len(trace.requests) == 500 and trace == make(500, 1) != make(500, 2)
        assert 0.5 < ideal_hit_rate(trace) < 0.9
        for request in trace.requests:
            assert len(request.block_ids) == -(-request.input_tokens // 512)


def test_copies_share_only_the_system_prompt():
    trace = superpose(load_trace("chat", 200, 0), 2)
    assert len(trace.requests) == 400
    one = superpose(load_trace("chat", 200, 0), 1)
    shared = set.intersection(*({b for r in part for b in r.block_ids} for part in (one.requests, trace.requests)))
    assert {b for r in one.requests for b in r.block_ids} == shared
    assert abs(ideal_hit_rate(trace) - ideal_hit_rate(one)) < 0.03


def test_coarse_stamps_are_spread_and_fine_ones_are_kept():
    coarse = Trace("t", [TraceRequest(3.0 * (n // 10), 1, 1, ()) for n in range(100)])
    arrivals = [request.arrival_s for request in spread(coarse, random.Random(0)).requests]
    assert len(set(arrivals)) == 100 and arrivals == sorted(arrivals)
    fine = Trace("t", [TraceRequest(float(n), 1, 1, ()) for n in range(100)])
    assert spread(fine, random.Random(0)) is fine


def test_published_formats_are_read(tmp_path):
    lines = tmp_path / "mooncake.jsonl"
    lines.write_text('{"timestamp": 1500, "input_length": 600, "output_length": 7, "hash_ids": [0, 5]}\n')
    assert read_trace(lines).requests == [TraceRequest(1.5, 600, 7, (0, 5))]
    azure = tmp_path / "azure.csv"
    rows = "2023-11-16 18:17:03.9799600,600,10\n2023-11-16 18:17:04.9799600,30,8\n"
    azure.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + rows)
    first, second = read_trace(azure).requests
    assert (second.arrival_s - first.arrival_s, first.block_ids, second.block_ids) == (pytest.approx(1.0), (0, 1), (2,))


@pytest.mark.parametrize(
    ("name", "text"),
    [("a.jsonl", "{}\n"), ("a.jsonl", "no\n"), ("a.csv", "TIMESTAMP,ContextTokens\nx,y\n"), ("empty.jsonl", "")],
)
def test_a_broken_trace_is_named(tmp_path, name, text):
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=name):
        read_trace(tmp_path / name)


def test_the_command_reports_and_draws(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    plot = tmp_path / "policies.png"
    flags = ["--requests", "100", "--policy", "warm_prefix,round_robin", "--load", "0.5", "--plot", str(plot), "--json"]
    assert cli(["simulate", *flags]) == 0
    result = json.loads(capsys.readouterr().out)
    assert set(result["policies"]) == {"warm_prefix", "round_robin"}
    assert result["policies"]["warm_prefix"]["requests"] == 100
    assert plot.read_bytes().startswith(b"\x89PNG") and "<svg" in plot.with_suffix(".html").read_text()
    assert cli(["simulate", "--policy", "warmest"]) == 2
    assert cli(["simulate", "--trace", "nowhere.jsonl"]) == 2


def test_the_benchmark_runs_and_reports(capsys):
    assert cli(["bench", "routing", "--traces=", "--quick", "--json", "--processes", "1"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert len(result["cells"]) == 6 and result["bars"]
