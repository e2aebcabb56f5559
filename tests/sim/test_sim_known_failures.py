"""Where other routers fail at the scale of a cluster: the production router before simulated replicas.

Each test first shows, with that router's own rule, that the traffic does bring the failure about.
"""

import random
from collections import Counter

from warmroot.deploy.simulate.cluster import SimulatedCluster
from warmroot.deploy.simulate.costs import ReplicaCosts
from warmroot.deploy.simulate.results import Results
from warmroot.deploy.simulate.scenario import load_trace, scaled, setup_of
from warmroot.deploy.simulate.trace import MOONCAKE_BLOCK, Trace, TraceRequest

COSTS = ReplicaCosts()
REPLICAS = 8


def play(trace, policy, **options):
    """The summary, and every request's end."""
    cluster, ends = SimulatedCluster(trace, setup_of(policy, REPLICAS, trace, **options)), []

    def add(outcome):
        ends.append(outcome)
        Results.add(cluster.results, outcome)

    cluster.results.add = add
    summary = cluster.run().summary()
    assert summary["requests"] == len(trace.requests)
    for router in cluster._routers:
        assert router.core.num_waiting == 0 and not router.core.in_flight._accounts
    return summary, ends


def shares(ends):
    """Of the requests, by replica, with 1 for an even share."""
    count = Counter(outcome.replica for outcome in ends)
    return {replica: found * REPLICAS / len(ends) for replica, found in count.items()}


def poisson(count, per_second, prefix_blocks, own_blocks, output_tokens=100):
    rng, at, requests = random.Random(0), 0.0, []
    for number in range(count):
        at += rng.expovariate(per_second)
        own = range(10**6 + number * own_blocks, 10**6 + (number + 1) * own_blocks)
        blocks = (*range(prefix_blocks), *own)
        requests.append(TraceRequest(at, MOONCAKE_BLOCK * len(blocks), output_tokens, blocks))
    return Trace("poisson", requests)


def test_cold_requests_do_not_all_go_to_the_emptiest_cache():
    """Row 1 (SGLang #14532): a replica that was just started again holds the least, and is not the idlest for that."""
    cold = poisson(1000, 0.7 * REPLICAS / COSTS.prompt_s(4096), 0, 8)
    middle = cold.requests[300].arrival_s

    def after(policy):
        summary, ends = play(cold, policy, kill_at=middle, restart_after=1.0)
        return summary["ttft_p99_s"], shares([end for end in ends if end.arrived_at > middle + 1.0])["r0"]

    (slow_s, piled), (ttft_s, share) = after("ray"), after("warm_prefix")
    assert piled > 1.3 and slow_s > 2.0
    assert share < 1.15 and ttft_s < slow_s / 3


def test_prefixes_are_kept_while_every_replica_is_busy():
    """Row 2 (SGLang #32195): where all give up their prefixes, everything is computed again, and it gets worse."""
    agent = load_trace("agent", 1200, 3)
    calm, _ = play(scaled(agent, REPLICAS, 1.0, COSTS), "warm_prefix")
    busy, _ = play(scaled(agent, REPLICAS, 3.0, COSTS), "warm_prefix")
    blind, _ = play(scaled(agent, REPLICAS, 3.0, COSTS), "round_robin")
    assert busy["ttft_p99_s"] > 5 * calm["ttft_p99_s"]
    assert blind["hit_rate"] < 0.75 * calm["hit_rate"]
    assert busy["hit_rate"] > 0.8 * calm["hit_rate"]
    assert busy["ttft_mean_s"] < blind["ttft_mean_s"] / 2
    assert busy["imbalance"] < 1.2


def test_a_hot_prefix_does_not_pile_up_where_it_is():
    """Row 4 (production-stack #1035, #502): more requests with one prefix than the replica that holds it can do."""
    hot = poisson(1000, 60.0, 32, 2, 200)
    piled, ends = play(hot, "llmd_precise")
    assert max(shares(ends).values()) == REPLICAS and piled["ttft_p50_s"] > 5.0
    found, ends = play(hot, "warm_prefix")
    assert max(shares(ends).values()) < 2.0 and len(shares(ends)) == REPLICAS
    assert found["ttft_p50_s"] < 0.5 and found["hit_rate"] > 0.92


def test_several_routers_do_not_herd():
    """Row 5 (Dynamo #589, #11035): all see the same replica idle at the same time."""
    cold = poisson(1200, 0.8 * REPLICAS / COSTS.prompt_s(4096), 0, 8)
    alone, _ = play(cold, "warm_prefix")
    several, ends = play(cold, "warm_prefix", num_routers=8)
    assert max(shares(ends).values()) < 1.15
    assert several["ttft_mean_s"] < 1.3 * alone["ttft_mean_s"]
    deaf, _ = play(cold, "warm_prefix", num_routers=8, word_lag_s=1e9)
    assert deaf["ttft_mean_s"] > several["ttft_mean_s"]
