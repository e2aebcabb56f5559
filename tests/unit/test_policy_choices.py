import math
import random
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from warmroot.cluster.errors import ConfigError
from warmroot.router.policy import POLICIES, Candidates, Column, RoutingRequest, make_policy
from warmroot.router.policy.rates import Kind, Kinds, ReplicaRates
from warmroot.router.policy.sessions import Sessions

KIND = {"model": "m", "kernels": "k", "weights_format": "fp16", "num_threads": 1, "ranks": (), "decode_step_s": 0.01}
SPEEDS = {"a": 229.0, "b": 467.0, "c": 300.0, "slow": 30.0}


def candidate(name, cached=0, running=0, waiting_tokens=0, kv=0, backlog=0.0, unfinished=0, rate=1000.0, seqs=64):
    column = [running, 0, waiting_tokens, kv / 100, seqs, 0.0, 1 / rate, 0.01, 100_000, unfinished, 0, 0, backlog, 0, 0]
    return name, cached, column


def together(columns):
    names, cached, table = zip(*columns, strict=True) if columns else ((), (), np.zeros((0, len(Column))))
    return Candidates(names, np.array(table, dtype=float).T, np.array(cached, dtype=float), 0.0)


def best(policy, *columns, tokens=1000, session=""):
    policy = make_policy(policy, random.Random(0))
    return policy.choose(RoutingRequest("r", tokens, session), together(columns)).best


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
    unique_by=lambda c: c[0],
)


@pytest.mark.parametrize("name", POLICIES)
@settings(max_examples=50, deadline=None)
@given(seen=candidates, tokens=counts, session=st.text(max_size=5))
def test_every_candidate_is_ranked_exactly_once(name, seen, tokens, session):
    ranking = make_policy(name, random.Random(0)).choose(RoutingRequest("r", tokens, session), together(seen))
    ranked = list(ranking)
    assert sorted(r.replica for r in ranked) == sorted(c[0] for c in seen)
    assert [r.cost for r in ranked[1:]] == sorted(r.cost for r in ranked[1:])
    assert not ranked or ranked[0].cost <= min(r.cost for r in ranked) + (name == "warm_prefix") * 0.005
    assert len(ranking) == len(seen) and (not seen or ranking.best == ranked[0])
    assert all(math.isfinite(r.cost) and r.reason for r in ranked)


@pytest.mark.parametrize("name", [n for n in POLICIES if n != "session_affinity"])
def test_equal_replicas_share_the_load(name):
    policy, counts = make_policy(name, random.Random(1)), {"a": 0, "b": 0, "c": 0}
    for _ in range(600):
        counts[policy.choose(RoutingRequest("r", 100), together([candidate(n) for n in "abc"])).best.replica] += 1
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


def test_warm_prefix_fears_no_more_tokens_than_a_request_may_generate():
    policy, warm = make_policy("warm_prefix", random.Random(0)), candidate("a", cached=20_000, running=2, kv=30)
    columns = together([warm, candidate("b", cached=19_900)])
    short, long = (RoutingRequest("r", 20_000, max_output=limit) for limit in (16, 1000))
    assert policy.choose(long, columns).best.replica == "b"
    assert policy.choose(short, columns).best.replica == "a"
    step_s = 0.01 * (1 + 9.41 * 0.2 - 4.48 * 0.04)
    assert policy.choose(short, columns).costs[1] == pytest.approx(0.25 + 16 * 0.05 * step_s)


def test_round_robin_takes_turns_in_any_order_of_candidates():
    policy = make_policy("round_robin")
    turns = [
        policy.choose(RoutingRequest("r", 1), together([candidate(n) for n in order])).best.replica
        for order in ("abc", "cba")
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


def test_sessions_spread_evenly_and_every_router_agrees():
    names = [f"replica-{n}" for n in range(10)]
    homes = Counter()
    for session in map(str, range(2000)):
        costs = Sessions().costs(session, names)
        assert ((costs >= 0) & (costs <= 1)).all()
        homes[names[costs.argmin()]] += 1
    assert all(140 < count < 260 for count in homes.values())
    sessions = Sessions()
    assert list(sessions.costs("s", names)) == list(Sessions().costs("s", names[::-1]))[::-1]
    sessions.forget("replica-3")
    assert list(sessions.costs("s", names)) == list(Sessions().costs("s", names))


def test_warm_prefix_keeps_a_session_at_home_unless_that_costs_much():
    names = "abcd"
    home = best("warm_prefix", *map(candidate, names), session="s").replica
    assert {best("warm_prefix", *map(candidate, names), session=str(n)).replica for n in range(40)} == set(names)

    def with_backlog(seconds):
        columns = [candidate(n, backlog=seconds if n == home else 0.0, running=int(n == home)) for n in names]
        return best("warm_prefix", *columns, session="s").replica

    assert with_backlog(0.06) == home
    assert with_backlog(0.2) != home
    assert (
        best("warm_prefix", *(candidate(n, cached=500 if n != home else 0) for n in names), session="s").replica != home
    )


def test_short_equal_prompts_spread_where_estimates_hardly_differ():
    columns = [candidate(n, rate=rate) for n, rate in zip("abcd", (1000.0, 1002.0, 1004.0, 1006.0), strict=True)]
    policy = make_policy("warm_prefix", random.Random(0))
    chosen = Counter(policy.choose(RoutingRequest("r", 20), together(columns)).best.replica for _ in range(200))
    assert all(chosen[name] > 25 for name in "abcd")
    busy = [candidate(n, rate=1000.0 + i, unfinished=n != "c", kv=0) for i, n in enumerate("abcd")]
    chosen = Counter(policy.choose(RoutingRequest("r", 20), together(busy)).best.replica for _ in range(50))
    assert chosen == {"c": 50}


def test_a_tie_never_gives_up_what_is_cached():
    columns = [candidate("a", cached=4, unfinished=1), candidate("b", unfinished=0)]
    assert best("warm_prefix", *columns, tokens=5).replica == "a"


def test_wild_measurements_move_the_rates_only_so_far():
    rates = ReplicaRates(Kind(1000.0, 0.01))
    rates.observe_prefill(10, 1000.0)
    for garbage in (0.0, -1.0, float("nan"), float("inf")):
        rates.observe_prefill(1000, garbage)
        rates.observe_decode(garbage, 1.0)
    assert (rates.prefill_tokens_per_s, rates.fixed_s, rates.decode_step_s) == (1000.0, 0.0, 0.01)
    rates.observe_prefill(1000, 1e-9)
    assert 1000 < rates.prefill_tokens_per_s < 2000
    for _ in range(1000):
        rates.observe_prefill(1000, 1e-9)
    assert rates.prefill_tokens_per_s <= 16_001
    for _ in range(3000):
        rates.observe_prefill(1000, 1e9)
        rates.observe_decode(1e9, 1.0)
    assert (rates.prefill_tokens_per_s, rates.decode_step_s) == (pytest.approx(62.5), pytest.approx(0.16))


def test_rates_find_the_fixed_and_the_growing_part_of_a_prefill():
    rates, rng = ReplicaRates(Kind(1000.0, 0.01)), random.Random(0)
    for _ in range(300):
        tokens = rng.choice([50, 500, 5000])
        rates.observe_prefill(tokens, (0.03 + tokens / 4000) * rng.uniform(0.9, 1.1))
        rates.observe_decode(0.04, 2.0)
    assert rates.fixed_s == pytest.approx(0.03, rel=0.15)
    assert rates.token_s == pytest.approx(1 / 4000, rel=0.05)
    assert rates.prefill_s(1000) == pytest.approx(0.28, rel=0.05)
    assert rates.decode_step_s == pytest.approx(0.02, rel=0.01)


def test_replicas_of_a_kind_are_as_fast_as_each_other_until_one_clearly_is_not():
    rng, kind = random.Random(1), Kind(1000.0, 0.01)
    equals, slow = [ReplicaRates(kind) for _ in range(7)], ReplicaRates(kind)
    for _ in range(100):
        for rates in [*equals, slow]:
            takes = rng.lognormvariate(0.0, 0.3) * (2.0 if rates is slow else 1.0)
            tokens = rng.choice([50, 500, 5000])
            rates.observe_prefill(tokens, (0.03 + tokens / 1000) * takes)
            rates.observe_decode(0.02 * takes, 1.0)
    factors = [factor for rates in equals for factor in (rates.prefill_factor, rates.step_factor)]
    assert all(0.9 < factor < 1.1 for factor in factors) and factors.count(1.0) >= 7
    assert 1.5 < slow.prefill_factor < 2.1 and 1.5 < slow.step_factor < 2.1
    newcomer = ReplicaRates(kind)
    assert newcomer.decode_step_s == pytest.approx(0.02, rel=0.15)


@pytest.mark.parametrize("seed", [0.0, -5.0, float("nan"), float("inf")])
def test_a_useless_seed_is_replaced(seed):
    rates = ReplicaRates(Kind(seed, seed))
    assert (rates.prefill_tokens_per_s, rates.decode_step_s) == (1000.0, 0.02)


def test_a_kind_outlives_a_moment_without_replicas():
    infos = [SimpleNamespace(**KIND, replica=name, epoch=1, prefill_tokens_per_s=rate) for name, rate in SPEEDS.items()]
    kinds = Kinds()
    first = kinds.of(infos)
    assert first["a"] is first["b"] is first["c"] is not first["slow"]
    assert 1 / first["a"].token_s == pytest.approx(264.5) and 1 / first["slow"].token_s == pytest.approx(30.0)
    first["a"].observe_prefill(100, 0.1)
    assert kinds.of([]) == {}
    assert kinds.of(infos[:1])["a"] is first["a"]
