"""Gangs whose experts are spread further than attention: each group serves its own, and experts move meanwhile."""

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from warmroot.actors.parallel.gang import GangExecutor, start_gang
from warmroot.actors.parallel.spawn import RankProcesses
from warmroot.actors.runner.calibration import calibrate
from warmroot.actors.runner.load import KvMemoryConfig, load_runner
from warmroot.cluster.ids import RequestId
from warmroot.cluster.messages import GenerateRequest
from warmroot.cluster.sampling_params import SamplingParams
from warmroot.cluster.topology import Topology

from .expert_models import KV, Output, gang_config, requests, save_model, serve

Start = Callable[..., tuple[RankProcesses, GangExecutor]]
TOPOLOGIES = [Topology(ep=2), Topology(tp=2, ep=4), Topology(pp=2, ep=2)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return save_model(tmp_path_factory.mktemp("experts"))


@pytest.fixture(scope="module")
def expected(folder) -> Output:
    output, errors = serve(load_runner(folder, dtype="float32", kv=KV), requests())
    assert not errors
    return output


@pytest.fixture
def start() -> Iterator[Start]:
    started: list[GangExecutor] = []

    def run(folder: Path, topology: Topology, **options) -> tuple[RankProcesses, GangExecutor]:
        crew = RankProcesses(gang_config(folder, topology, **options))
        started.append(start_gang(crew))
        return crew, started[-1]

    yield run
    for executor in started:
        executor.shutdown()


@pytest.mark.parametrize("topology", TOPOLOGIES, ids=["ep 2", "tp 2 ep 4", "pp 2 ep 2"])
def test_the_same_tokens_from_groups_that_share_experts(start, folder, expected, topology):
    """Also of one request alone, by engines that were made anew over the same ranks. Then a rank is lost."""
    crew, executor = start(folder, topology)
    assert executor.num_groups == 2 and calibrate(executor).decode_step_s > 0
    assert serve(executor, requests()) == (expected, [])
    assert serve(executor, requests(1, "lone")) == ({"lone0": expected["r0"]}, [])
    assert all(times.num_steps > 50 and times.expert_rows for times in executor.times())
    last = [place for place in topology.places() if place.dp_rank == 1][-1].rank
    os.kill(crew.pids[last], signal.SIGKILL)
    _, errors = serve(executor, requests(12, "lost"))
    assert len(errors) == 12 and all(f"rank {last}" in error for error in errors)


def crowd(name: str) -> list[GenerateRequest]:
    """Many different tokens."""
    return [
        GenerateRequest(
            request_id=RequestId(f"{name}{n}"),
            prompt_token_ids=[4 + (7 * n + 11 * index * index) % 120 for index in range(40)],
            params=SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True),
        )
        for n in range(32)
    ]


@pytest.mark.parametrize(
    ("topology", "num_redundant"), [(Topology(ep=4), 4), (Topology(tp=2, ep=2), 0)], ids=["ep 4", "tp 2 ep 2"]
)
def test_hot_experts_are_spread_while_the_gang_serves(start, tmp_path, topology, num_redundant):
    """Most tokens want the same experts: the fullest rank's work falls to 1.15 of the mean, and no token changes."""
    folder = save_model(tmp_path, skew=0.8)
    kv = KvMemoryConfig(block_size=4, num_kv_blocks=600)
    limits = {"max_num_seqs": 32, "max_num_batched_tokens": 64}
    expected, errors = serve(load_runner(folder, dtype="float32", kv=kv), crowd("a"), **limits)
    assert not errors
    _, executor = start(folder, topology, kv=kv, num_redundant_experts=num_redundant)
    shares: list[float] = []
    done = [0] * topology.world_size
    for name in "abcd":
        output, errors = serve(executor, crowd(name), **limits)
        assert not errors and output == {request.replace("a", name): found for request, found in expected.items()}
        rows = [times.expert_rows for times in executor.times()]
        work = [now - before for now, before in zip(rows, done, strict=True)]
        done = rows
        shares.append(max(work) * len(work) / sum(work))
    found = executor.experts()
    assert [balance.layer for balance in found] == [0, 1]
    assert all(balance.imbalance <= 1.15 for balance in found) and sum(balance.num_moves for balance in found) > 1
    assert max(balance.imbalance_at_start for balance in found) > 1.3
    assert shares[-1] <= 1.15, shares
