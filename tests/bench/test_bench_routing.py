"""``warmroot bench routing``: its load, its memory, and a quick run with four replicas, two ingresses and Redis."""

import json
import shutil
from argparse import Namespace
from itertools import pairwise

import pytest

from warmroot.cluster.errors import ConfigError
from warmroot.deploy.bench import routing
from warmroot.deploy.bench.peers.protocol import Job
from warmroot.deploy.bench.routing_systems import jobs_of, num_blocks, shared_tokens, systems_of
from warmroot.deploy.bench.workload import LengthRange, Workloads

FLEET = ["--replicas", "4", "--ingresses", "2", "--metadata-store", "redis", "--workload", "chat"]


def options(**changes: object) -> Namespace:
    values = {"replicas": 4, "ingresses": 2, "systems": "round_robin,ray,one", "workload": "chat"}
    sizes = {"prefixes": 2, "per_prefix": 8, "prefix_tokens": 160, "cache_share": 0.5}
    return Namespace(**{**values, **sizes, **changes})


def workloads() -> Workloads:
    return Workloads(lambda text: [ord(character) for character in text], 5)


def test_a_chat_grows_by_its_answer_and_the_next_message() -> None:
    jobs = workloads().chats(2, 6, 3, LengthRange(100, 100), LengthRange(10, 20), LengthRange(4, 4))
    assert len(jobs) == 12
    sessions: dict[tuple[int, ...], list[Job]] = {}
    for job in jobs:
        sessions.setdefault(tuple(job.prompt[:108]), []).append(job)
    assert len(sessions) == 4 and len({head[:100] for head in sessions}) == 2
    for turns in sessions.values():
        assert len(turns) == 3
        for before, after in pairwise(turns):
            assert after.prompt[: len(before.prompt)] == before.prompt
            assert 14 <= len(after.prompt) - len(before.prompt) <= 24
    assert [tuple(job.prompt[:108]) for job in jobs] != [head for head in sessions for _ in range(3)]


def test_shared_tokens_begin_an_earlier_request() -> None:
    first, second = list(range(40)), [*range(30), 7, 31, 32]
    assert shared_tokens([Job(first, 1)]) == 0
    assert shared_tokens([Job(first, 1), Job(second, 1)]) == pytest.approx(30 / 73)
    assert shared_tokens([Job(first, 1), Job(first, 1)]) == pytest.approx(39 / 80)


def test_one_replica_has_the_memory_of_all() -> None:
    few = options()
    ours, *others, one = systems_of(few)
    assert [(system.routing_policy, system.num_ingress) for system in (ours, *others)] == [
        ("warm_prefix", 2),
        ("round_robin", 2),
        ("ray", 1),
    ]
    # (2 * 160 shared + 16 * 112 of turns) / 2 in blocks of 16, and 8 requests of 160 tokens.
    assert num_blocks(ours, few) == 1 + 66 + 80
    assert num_blocks(one, few) == 1 + 4 * (66 + 80)


def test_jobs_of_both_workloads() -> None:
    for workload in ("chat", "prefixes"):
        jobs = jobs_of(workloads(), options(workload=workload))
        assert len(jobs) == 16 and {job.max_tokens for job in jobs} == {16}
        assert 0.5 < shared_tokens(jobs) < 0.9


def test_unknown_systems_are_refused() -> None:
    with pytest.raises(ConfigError, match="'best' is neither one nor a routing policy"):
        systems_of(options(systems="round_robin,best"))


def test_without_a_redis_server_it_is_skipped(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert routing.main(["--json", *FLEET]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["skipped"] == "no redis-server" and "skipped: no redis-server" in err


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.cluster
@pytest.mark.timeout(900)
@pytest.mark.skipif(shutil.which("redis-server") is None, reason="redis-server is not installed")
def test_bench_routing_quick(capsys: pytest.CaptureFixture[str]) -> None:
    assert routing.main(["--quick", "--json", *FLEET, "--systems", "round_robin", "--rate", "4"]) == 0
    result = json.loads(capsys.readouterr().out)
    warm, blind = result["systems"].values()
    assert (warm["policy"], warm["ingresses"], blind["policy"]) == ("warm_prefix", 2, "round_robin")
    for system in (warm, blind):
        (shares,) = system["requests_by_replica"]
        assert sum(shares.values()) == 8
        assert 0 < system["ttft_p50_s"] <= system["ttft_p90_s"] <= system["ttft_p99_s"]
    assert len(blind["requests_by_replica"][0]) == 4
    (ratios,) = result["ratios"].values()
    assert ratios["cached_token_rate"] > 0 and ratios["ttft_mean_s"] > 0
    assert len(result["bars"]) == 3
