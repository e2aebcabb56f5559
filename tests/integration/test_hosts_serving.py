"""Two replicas, each a gang over hosts, behind one endpoint: what clients meet while something fails."""

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import small_tokenizers
import torch
import transformers

from .cluster_harness import wait_until
from .hosts_harness import Host, Lan, ray_hosts, why_no_hosts
from .hosts_serving import MODEL, START_S, Gang, Served, serve_over
from .hosts_traffic import Traffic, counted

pytestmark = [
    pytest.mark.slow,
    pytest.mark.hosts,
    pytest.mark.cluster,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(why_no_hosts() is not None, reason=str(why_no_hosts())),
]

FLAGS = [
    *("--num-replicas", "2", "--tensor-parallel-size", "2", "--pipeline-parallel-size", "2"),
    *("--threads-per-replica", "4", "--num-kv-blocks", "200", "--max-num-seqs", "16", "--dtype", "float32"),
    *("--num-ingress", "3", "--step-timeout", "60", "--routing-policy", "round_robin"),
]
CUT_S = 30.0
HANG_S = 60.0
"""A request that takes longer has hung, even on a machine that does much else."""

RETRYABLE = {"ok", "pending"} | {
    f"{how} {code}" for how in ("503", "event") for code in ("replica_unavailable", "rank_lost")
}
CUT_SHORT = {"RemoteProtocolError", "ReadError", "stream cut short"}
"""What clients see whose ingress is on a host that is lost."""


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tokenizer = small_tokenizers.byte_level()
    torch.manual_seed(1)
    config = transformers.LlamaConfig(
        vocab_size=tokenizer.vocab_size,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=tokenizer.bos_token_id,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    (folder / "tokenizer.json").write_text(tokenizer.to_dict()["tokenizer"])
    (folder / "tokenizer_config.json").write_text(json.dumps(dict(tokenizer.special_tokens)))
    return folder


@pytest.fixture(scope="module")
def lan() -> Iterator[Lan]:
    # A stage takes two. Off the head no host is in both gangs, and both can do without it.
    with ray_hosts([6, 2, 2]) as lan:
        yield lan


@pytest.fixture(scope="module")
def served(lan: Lan, model: Path) -> Iterator[Served]:
    with serve_over(lan, model, FLAGS) as served:
        yield served


@pytest.fixture(scope="module")
def traffic(served: Served) -> Iterator[Traffic]:
    traffic = Traffic(served.url, MODEL)
    yield traffic
    traffic.close()


@pytest.fixture
def say(capsys) -> Callable[[str], None]:
    def say(text: str) -> None:
        with capsys.disabled():
            print(text, flush=True)

    return say


def test_a_rank_is_killed(served: Served, traffic: Traffic, say):
    gangs = served.wait_for(2)
    say(f"gangs on {[gang.hosts for gang in gangs]}")
    assert any(len(gang.hosts) == 2 for gang in gangs)
    victim, host = off_the_head(served, gangs)
    pid = next(pid for place, pid in victim.ranks if place is host)
    served.wait_busy(victim)
    began = time.time()
    os.kill(host.process(pid).pid, signal.SIGKILL)
    wait_for_recovery("rank killed", served, traffic, victim, began, say)
    check_clean(served)


def test_a_link_is_cut(lan: Lan, served: Served, traffic: Traffic, say):
    victim, host = off_the_head(served, served.wait_for(2))
    say(f"gang on {victim.hosts}, led from {victim.ranks[0][0].name}; {host.name} is cut off")
    served.wait_busy(victim)
    began = time.time()
    lan.cut(host)
    try:
        if len(victim.hosts) == 2:
            wait_until(lambda: not served.rank_processes() & ranks_of([victim]), 30.0, served.rank_processes)
            say(f"link cut: ranks on both sides have ended after {time.time() - began:.1f} s")
        wait_for_recovery("link cut", served, traffic, victim, began, say, may_lose_ingress=True)
        time.sleep(max(0.0, began + CUT_S - time.time()))
    finally:
        lan.mend(host)
    mended = time.time()
    wait_until(lambda: served.ray_state()["nodes"] == 3, START_S)
    check_clean(served)
    answers = traffic.between(mended, time.time())
    say(f"link mended: its node is back after {time.time() - mended:.1f} s, {counted(answers)}")
    assert {answer.outcome for answer in answers} <= {"ok", "pending"}


def test_a_leader_is_killed(served: Served, traffic: Traffic, say):
    victim = min(served.wait_for(2), key=lambda gang: len(gang.hosts))  # so that gangs are spread again
    served.wait_busy(victim)
    began = time.time()
    os.kill(served.leader(victim).pid, signal.SIGKILL)
    wait_until(lambda: len(served.starting()) == 1, START_S)
    killed_again = time.time()
    os.kill(served.starting()[0].pid, signal.SIGKILL)
    say(f"leader killed: and its successor, which had started ranks, {killed_again - began:.1f} s later")
    wait_for_recovery("leader killed", served, traffic, victim, began, say)
    check_clean(served)


def test_a_raylet_is_killed(served: Served, traffic: Traffic, say):
    victim, host = off_the_head(served, served.wait_for(2))
    served.wait_busy(victim)
    began = time.time()
    os.kill(host.raylet().pid, signal.SIGKILL)
    wait_for_recovery("raylet killed", served, traffic, victim, began, say, may_lose_ingress=True)
    wait_until(lambda: served.ray_state()["nodes"] == 3, START_S)
    say(f"raylet killed: its node is back after {time.time() - began:.1f} s")
    check_clean(served)
    doors = [host for host in served.lan.hosts if host.processes("bin/haproxy")]
    wait_until(lambda: all(served.answers_at(door) for door in doors), 60.0, lambda: doors)
    assert all(served.answers_at(door) for door in doors for _ in range(20))  # nobody is left of the old ones


def off_the_head(served: Served, gangs: list[Gang]) -> tuple[Gang, Host]:
    """A host with ranks of only one gang, without which the cluster goes on, and that gang. Rather one that spans, and
    rather its leader's host.
    """
    found: list[tuple[Gang, Host]] = []
    for host in served.lan.hosts[1:]:
        there = [gang for gang in gangs if host.name in gang.hosts]
        found += [(there[0], host)] if len(there) == 1 else []
    assert found, f"every host has ranks of both gangs or none: {[gang.hosts for gang in gangs]}"
    return max(found, key=lambda choice: (len(choice[0].hosts), choice[0].ranks[0][0] is choice[1]))


def wait_for_recovery(
    fault: str,
    served: Served,
    traffic: Traffic,
    victim: Gang,
    began: float,
    say: Callable[[str], None],
    *,
    may_lose_ingress: bool = False,
) -> None:
    """Another gang takes the place of the one that broke; meanwhile clients meet nothing worse than a 503."""
    gangs = served.wait_for(2, gone=victim.replica)
    recovered = time.time()
    answers = traffic.between(began, recovered)
    say(f"{fault}: two replicas again after {recovered - began:.1f} s, on {[gang.hosts for gang in gangs]}")
    say(f"{fault}: {counted(answers)}")
    assert max(gang.epoch for gang in gangs) > victim.epoch
    assert all(answer.ended - answer.began < HANG_S for answer in answers)
    assert {answer.outcome for answer in answers} <= RETRYABLE | (CUT_SHORT if may_lose_ingress else set())
    served_by = {answer.replica for answer in answers if answer.began > began and answer.outcome == "ok"}
    assert served_by - {victim.replica}, "nobody was served meanwhile"


def check_clean(served: Served) -> None:
    """Nothing is left of gangs that are gone: no process, and no place that is held for one."""
    wait_until(lambda: served.rank_processes() == ranks_of(served.gangs()), 60.0, served.rank_processes)
    assert served.ray_state()["groups"] == ["CREATED", "CREATED"]


def ranks_of(gangs: list[Gang]) -> set[tuple[str, int]]:
    return {(host.name, pid) for gang in gangs for host, pid in gang.ranks}
