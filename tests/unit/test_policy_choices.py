import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from warmroot.cluster.errors import ConfigError
from warmroot.cluster.messages import Load
from warmroot.router.policy import POLICIES, Candidate, RoutingRequest, make_policy
from warmroot.router.policy.rates import ReplicaRates


def candidate(name, cached=0, running=0, waiting_tokens=0, kv=0, backlog=0.0, unfinished=0, rate=1000.0, seqs=64):
    load = Load(
        running=running, waiting_tokens=waiting_tokens, kv_used_blocks=kv, kv_total_blocks=100, max_num_seqs=seqs
    )
    return Candidate(name, cached, load, unfinished, backlog, rate, 0.01, 100_000)


def best(policy, *candidates, tokens=1000, session=""):
    return make_policy(policy, random.Random(0)).choose(RoutingRequest("r", tokens, session), candidates)[0]


counts = st.integers(0, 10**6)
candidates = st.lists(
    st.builds(
        candidate,
        st.uuids().map(str),
        cached=counts,
        running=counts,
        waiting_tokens=counts,
        kv=counts,
        backlog=st.floats(0, 1e6),
        unfinished=counts,
        rate=st.floats(1e-3, 1e9),
        seqs=st.integers(1, 1000),
    ),
    max_size=20,
    unique_by=lambda c: c.replica,
)


@pytest.mark.parametrize("name", POLICIES)
@settings(max_examples=50, deadline=None)
@given(seen=candidates, tokens=counts, session=st.text(max_size=5))
def test_every_candidate_is_ranked_exactly_once(name, seen, tokens, session):
    ranked = make_policy(name, random.Random(0)).choose(RoutingRequest("r", tokens, session), seen)
    assert sorted(r.replica for r in ranked) == sorted(c.replica for c in seen)
    assert all(math.isfinite(r.cost) and r.reason for r in ranked)


@pytest.mark.parametrize("name", [n for n in POLICIES if n != "session_affinity"])
def test_equal_replicas_share_the_load(name):
    policy, counts = make_policy(name, random.Random(1)), {"a": 0, "b": 0, "c": 0}
    for _ in range(600):
        counts[policy.choose(RoutingRequest("r", 100), [candidate(n) for n in "abc"])[0].replica] += 1
    assert min(counts.values()) > 150


def test_an_unknown_policy_is_a_config_error():
    with pytest.raises(ConfigError, match="warm_prefix") as caught:
        make_policy("warmest")
    assert caught.value.param == "routing_policy"


def test_warm_prefix_goes_where_the_prefix_is():
    assert best("warm_prefix", candidate("a"), candidate("b", cached=800))[::2] == ("b", "warm")
    assert best("warm_prefix", candidate("a", backlog=1.0), candidate("b"))[::2] == ("b", "cold")


def test_warm_prefix_leaves_a_warm_replica_whose_queue_costs_more():
    # 800 cached tokens save 2.5 * 0.8 s = 2 s.
    assert best("warm_prefix", candidate("a", cached=800, backlog=1.9), candidate("b")).replica == "a"
    assert best("warm_prefix", candidate("a", cached=800, backlog=2.1), candidate("b"))[::2] == ("b", "load")


def test_warm_prefix_believes_a_longer_queue_than_its_own():
    assert best("warm_prefix", candidate("a", waiting_tokens=5000), candidate("b", backlog=1.0)).replica == "b"


def test_warm_prefix_avoids_full_caches_and_full_batches():
    assert best("warm_prefix", candidate("a", kv=99), candidate("b")).replica == "b"
    assert best("warm_prefix", candidate("a", running=64), candidate("b", running=5)).replica == "b"


def test_warm_prefix_knows_who_is_fast():
    assert best("warm_prefix", candidate("a", rate=500.0), candidate("b", rate=2000.0)).replica == "b"


def test_warm_prefix_cost_is_in_seconds():
    # 100 uncached at 1000/s, weighted 2.5; one decode step of 10 ms at 1 % more KV, 200 * 0.05 of them.
    cost = best("warm_prefix", candidate("a", cached=900, backlog=0.5)).cost
    assert cost == pytest.approx(0.5 + 0.25 + 10 * 0.01 * (1 + 9.41 * 0.01 - 4.48 * 0.0001))


def test_round_robin_takes_turns_in_any_order_of_candidates():
    policy = make_policy("round_robin")
    turns = [
        policy.choose(RoutingRequest("r", 1), [candidate(n) for n in order])[0].replica for order in ("abc", "cba")
    ]
    assert turns == ["a", "b"]


def test_the_least_loaded_has_the_fewest_requests():
    assert best("least_loaded", candidate("a", running=3), candidate("b", unfinished=2)).replica == "b"
    assert best("power_of_two", candidate("a", running=3), candidate("b", running=2)).replica == "b"


def test_a_session_stays_and_moves_only_if_its_replica_is_gone():
    names = "abcdefgh"
    for session in map(str, range(50)):
        home = best("session_affinity", *map(candidate, names), session=session).replica
        left = [candidate(n) for n in names if n != "a"]
        assert best("session_affinity", *left, session=session).replica == home or home == "a"


def test_rates_learn_slowly_and_within_bounds():
    rates = ReplicaRates(1000.0, 0.01)
    rates.observe_prefill(10, 1000.0)
    assert rates.prefill_tokens_per_s == 1000.0
    for garbage in (0.0, -1.0, float("nan")):
        rates.observe_prefill(1000, garbage)
    rates.observe_decode(float("nan"), 0.0)
    rates.observe_decode(float("inf"), 0.0)
    assert (rates.prefill_tokens_per_s, rates.decode_step_s) == (1000.0, 0.01)
    rates.observe_prefill(1000, 1e-9)
    assert rates.prefill_tokens_per_s == pytest.approx(1000 * 3**0.2)
    for _ in range(1000):
        rates.observe_prefill(1000, 1e-9)
    assert rates.prefill_tokens_per_s == pytest.approx(16_000)
    for _ in range(100):
        rates.observe_prefill(1000, 0.5)
        rates.observe_decode(0.02, 0.0)
    assert rates.prefill_tokens_per_s == pytest.approx(2000, rel=0.01)
    assert rates.decode_step_s == pytest.approx(0.02, rel=0.01)


@pytest.mark.parametrize("seed", [0.0, -5.0, float("nan"), float("inf")])
def test_a_useless_seed_is_replaced(seed):
    rates = ReplicaRates(seed, seed)
    assert (rates.prefill_tokens_per_s, rates.decode_step_s) == (1000.0, 0.02)
