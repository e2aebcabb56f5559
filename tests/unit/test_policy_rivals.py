"""Rivals' policies: what their projects say they do, on cases small enough to do by hand."""

import random
from typing import get_args

import numpy as np
import pytest

from warmroot.cluster.config import RoutingPolicyName
from warmroot.kv_store.hashing import pack_tokens
from warmroot.router.policy import POLICIES, RIVALS, Candidates, Column, RoutingRequest, Scale, make_policy

SCALE = Scale(block_ids=1, tokens_per_id=100)


def request(ids, name="r"):
    return RoutingRequest(name, 100 * len(ids), tokens=pack_tokens(ids))


def seen(names="abc", cached=None, **columns):
    table = np.zeros((len(Column), len(names)))
    table[Column.KV_TOTAL_TOKENS], table[Column.MAX_NUM_SEQS], table[Column.PREFILL_TOKEN_S] = 1e5, 64, 1e-3
    for column, values in columns.items():
        table[Column[column.upper()]] = values
    return Candidates(list(names), table, np.array(cached or [0] * len(names), dtype=float), 0.0)


def policy(name):
    return make_policy(name, random.Random(0), SCALE)


def best(chooser, ids, **columns):
    return chooser.choose(request(ids), seen(**columns)).best.replica


@pytest.mark.parametrize("name", RIVALS)
def test_every_rival_ranks_everyone_and_forgets_who_left(name):
    rival = policy(name)
    for n in range(20):
        asked = request([n % 3, 10 + n], f"r{n}")
        ranking = rival.choose(asked, seen(unfinished=[n % 5, 1, 2]))
        assert sorted(ranked.replica for ranked in ranking) == ["a", "b", "c"]
        rival.routed(asked, ranking.best.replica)
        rival.first_token(asked, ranking.best.replica)
        if n % 2:
            rival.finished(asked, ranking.best.replica)
    for name in "abc":
        rival.left(name)
    assert len(list(rival.choose(request([1]), seen()))) == 3


def test_the_configuration_offers_all_of_them():
    offered = set(get_args(RoutingPolicyName))
    assert offered == {*POLICIES, *RIVALS}


def test_sglang_follows_its_tree_unless_loads_are_out_of_balance():
    sglang = policy("sglang")
    sglang.routed(request([1, 2, 3]), "b")
    assert best(sglang, [1, 2, 9], unfinished=[0, 60, 0]) == "b"
    assert best(sglang, [1, 7, 8, 9], unfinished=[0, 5, 1]) == "a"
    assert best(sglang, [1, 2, 9], unfinished=[1, 66, 0]) == "c"


def test_ray_never_balances_by_default_and_fills_the_emptiest_tree():
    ray, ray10 = policy("ray"), policy("ray10")
    for rival in (ray, ray10):
        rival.routed(request([1, 2, 3]), "b")
        rival.routed(request([7, 8]), "a")
        assert best(rival, [9]) == "c"
    assert best(ray, [1, 2, 9], unfinished=[0, 500, 0]) == "b"
    assert best(ray10, [1, 2, 9], unfinished=[1, 500, 0]) in ("a", "c")


def test_dynamo_counts_a_resident_block_like_one_to_compute():
    dynamo, scaled = policy("dynamo"), policy("dynamo10")
    for rival in (dynamo, scaled):
        for n in range(4):
            rival.routed(request([50 + n, 60 + n], f"x{n}"), "a")
    # a: 1 block to compute, 8 resident and 3 of this; b, c: 3 to compute and 3 of this.
    assert best(dynamo, [1, 2, 3], cached=[200, 0, 0]) in ("b", "c")
    assert best(scaled, [1, 2, 3], cached=[200, 0, 0]) == "a"
    for n in range(4):
        dynamo.finished(request([50 + n, 60 + n], f"x{n}"), "a")
    assert best(dynamo, [1, 2, 3], cached=[200, 0, 0]) == "a"


def test_llm_d_weighs_prefix_queue_and_kv():
    llmd = policy("llmd_precise")
    assert best(llmd, [1, 2], cached=[200, 0, 0]) == "a"
    assert best(llmd, [1, 2], cached=[200, 0, 0], waiting=[5, 0, 0], kv_usage=[0.9, 0.1, 0.2]) == "b"
    base = policy("llmd_base")
    base.routed(request([1, 2]), "c")
    assert best(base, [1, 2], cached=[200, 0, 0]) == "c"


def test_aibrix_matches_only_where_load_is_near_the_mean():
    aibrix = policy("aibrix")
    aibrix.routed(request([1, 2]), "a")
    assert best(aibrix, [1, 2], unfinished=[2, 2, 2]) == "a"
    assert best(aibrix, [1, 2], unfinished=[8, 1, 0]) == "c"
    assert best(aibrix, [1, 2], unfinished=[0, 9, 10]) == "a"


def test_preble_explores_by_recent_work_and_exploits_a_long_match():
    preble = policy("preble")
    first = preble.choose(request([1, 2, 3]), seen()).best
    preble.routed(request([1, 2, 3]), first.replica)
    assert preble.choose(request([8, 9]), seen()).best.replica != first.replica
    assert first.reason == "explore"


def test_a_hash_sticks_to_its_replica_until_that_one_is_full():
    consistent = policy("consistent_hash")
    home = best(consistent, [5, 6])
    assert best(consistent, [5, 6, 7], unfinished=[1, 1, 1]) in "abc"
    full = [30 if name == home else 0 for name in "abc"]
    assert best(consistent, [5, 6], unfinished=full) != home


def test_one_s_own_tree_forgets_the_least_lately_routed():
    llmd = policy("llmd_base")
    most = llmd.routed_prefixes._most_blocks
    llmd.routed(request([1, 2]), "a")
    llmd.routed(request(list(range(100, 100 + most))), "a")
    assert llmd.routed_prefixes.longest(SCALE.keys(request([1, 2])))[0] == 0
    assert llmd.routed_prefixes.sizes(["a"])[0] == most


def test_dynamo_s_queue_holds_requests_while_every_replica_has_a_step_to_prefill():
    waiting = policy("dynamo_wspt").binding(None)
    assert waiting is not None and policy("dynamo").binding(None) is None
    busy, one_free = seen(sent_tokens=[8193, 9000, 20000]), seen(sent_tokens=[8192, 9000, 20000])
    assert not waiting.is_free(busy, 0) and waiting.is_free(one_free, 2)
    # The shortest by what is cached nowhere: 300 tokens of which somebody holds 200 go before 200 unknown ones.
    assert waiting.work(seen(cached=[0, 200, 100]), 0, 300) == 100
    assert waiting.work(seen(), 0, 200) == 200


def test_gorgo_counts_whole_prompts_until_their_requests_end():
    gorgo = policy("gorgo")
    assert best(gorgo, [1, 2, 3], cached=[200, 0, 0], context_tokens=[150, 0, 60], sent_tokens=[0, 90, 0]) == "a"
    assert best(gorgo, [1, 2, 3], cached=[200, 0, 0], context_tokens=[250, 0, 60]) == "b"
