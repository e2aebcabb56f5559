"""Gangs of real processes: the same tokens as one process, and nothing left after whatever happens to them."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers

from warmroot.actors.engine.config import EngineConfig
from warmroot.actors.engine.engine import Engine
from warmroot.actors.engine.executor import Executor
from warmroot.actors.engine.plan import StepPlan
from warmroot.actors.parallel.gang import GangExecutor, start_gang
from warmroot.actors.parallel.gang_config import GangConfig
from warmroot.actors.parallel.spawn import RankProcesses
from warmroot.actors.runner.calibration import calibrate
from warmroot.actors.runner.load import KvMemoryConfig, load_runner
from warmroot.cluster.errors import ModelLoadError, RankLostError
from warmroot.cluster.ids import RequestId
from warmroot.cluster.messages import FinishReason, GenerateRequest
from warmroot.cluster.sampling_params import SamplingParams
from warmroot.cluster.topology import Topology
from warmroot.kv_store.hashing import namespace_root

PROMPT = torch.randint(4, 128, (60,), generator=torch.Generator().manual_seed(0)).tolist()
KV = KvMemoryConfig(block_size=4, num_kv_blocks=40)
LONG_S = 200.0
"""Longer than a test may take: what is noticed before has not been waited for."""
LEADER = Path(__file__).with_name("gang_leader.py")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    torch.manual_seed(3)
    config = transformers.LlamaConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        eos_token_id=2,
    )
    model = transformers.LlamaForCausalLM(config).eval()
    for parameter in model.parameters():
        parameter.data.normal_(0.0, 0.2)
    path = tmp_path_factory.mktemp("model")
    model.save_pretrained(path)
    return path


@pytest.fixture
def start(folder) -> Iterator[Callable[[Topology], tuple[RankProcesses, GangExecutor]]]:
    started: list[GangExecutor] = []

    def run(topology: Topology) -> tuple[RankProcesses, GangExecutor]:
        crew = RankProcesses(gang_config(folder, topology))
        started.append(start_gang(crew))
        return crew, started[-1]

    yield run
    for executor in started:
        executor.shutdown()


def gang_config(folder: Path, topology: Topology) -> GangConfig:
    return GangConfig(path=folder, topology=topology, kv=KV, threads_per_rank=1, dtype="float32", step_s=LONG_S)


def requests() -> list[GenerateRequest]:
    """On pages that are too few: shared prefixes, chunks, preemption, draws, penalties, ends that nobody foresees."""
    variants = [
        {"temperature": 0.0},
        {"temperature": 0.0, "logprobs": 2, "prompt_logprobs": 1},
        {},
        {"frequency_penalty": 1.0},
        {"stop_token_ids": (7, 9, 70)},
    ]
    return [
        GenerateRequest(
            request_id=RequestId(f"r{n}"),
            prompt_token_ids=PROMPT[: 9 + 3 * n] if n % 2 else PROMPT[n : 12 + 2 * n],
            params=SamplingParams(**{"max_tokens": 24, "ignore_eos": True, "seed": n} | variants[n % 5]),
        )
        for n in range(12)
    ]


def outputs(executor: Executor) -> dict[str, tuple[list[int], FinishReason]]:
    config = EngineConfig(max_model_len=100, max_num_seqs=8, max_num_batched_tokens=16)
    engine = Engine(executor, config, time.monotonic, namespace_root("test"))
    tokens: dict[str, list[int]] = {}
    reasons: dict[str, FinishReason] = {}
    for request in requests():
        engine.add(request)
    while engine.has_work:
        for delta in engine.step():
            tokens.setdefault(delta.request_id, []).extend(delta.token_ids)
            assert delta.error is None
            if delta.finish_reason is not None:
                reasons[delta.request_id] = delta.finish_reason
    return {name: (tokens[name], reasons[name]) for name in tokens}


@pytest.fixture(scope="module")
def expected(folder):
    return outputs(load_runner(folder, dtype="float32", kv=KV))


@pytest.mark.parametrize("sizes", [(1, 1), (2, 1), (1, 2), (2, 2)], ids=lambda sizes: "tp {} pp {}".format(*sizes))
def test_the_same_tokens_as_in_one_process(start, expected, sizes):
    tp, pp = sizes
    crew, executor = start(Topology(tp=tp, pp=pp))
    rates = calibrate(executor)
    assert rates.decode_step_s > 0
    assert outputs(executor) == expected
    assert [state.pid for state in executor.ranks()] == crew.pids
    for times, state in zip(executor.times(), executor.ranks(), strict=True):
        assert times.num_steps > 50 and times.idle_s > 0 and times.busy_s > 0
        assert (times.bubble_s > 0) == (state.stage > 0)
    executor.shutdown()
    assert_gone(crew.pids)


@pytest.mark.parametrize("topology", [Topology(tp=2), Topology(pp=2)], ids=["tp", "pp"])
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_killed_or_stopped_rank_ends_the_gang(start, topology, how):
    crew, executor = start(topology)
    executor.submit(StepPlan(step=1))
    assert executor.result().error is None
    os.kill(crew.pids[1], how)
    executor.submit(StepPlan(step=2))
    error = executor.result().error
    while error is None:  # rank 0 may have answered before the loss was noticed
        time.sleep(0.01)
        executor.submit(StepPlan(step=3))
        error = executor.result().error
    assert "rank 1" in error
    executor.shutdown()
    assert_gone(crew.pids)


@pytest.fixture(scope="module")
def sparse(tmp_path_factory):
    torch.manual_seed(3)
    config = transformers.MixtralConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        num_experts_per_tok=2,
        max_position_embeddings=256,
        sliding_window=None,
        eos_token_id=2,
    )
    model = transformers.MixtralForCausalLM(config).eval()
    for parameter in model.parameters():
        parameter.data.normal_(0.0, 0.2)
    path = tmp_path_factory.mktemp("sparse")
    model.save_pretrained(path)
    return path


@pytest.mark.parametrize("topology", [Topology(tp=2, ep=2), Topology(ep=2)], ids=["tp 2 ep 2", "ep 2"])
def test_the_same_tokens_with_experts_spread(sparse, topology):
    expected = outputs(load_runner(sparse, dtype="float32", kv=KV))
    executor = start_gang(RankProcesses(gang_config(sparse, topology)))
    try:
        assert outputs(executor) == expected
    finally:
        executor.shutdown()


def test_a_model_that_cannot_be_loaded(folder):
    crew = RankProcesses(gang_config(folder / "missing", Topology()))
    with pytest.raises(ModelLoadError, match=r"missing: no config\.json"):
        start_gang(crew)
    assert_gone(crew.pids)


def test_a_rank_that_dies_while_it_starts(folder):
    config = gang_config(folder, Topology(tp=2))
    crew = RankProcesses(replace(config, start_s=LONG_S))
    os.kill(crew.pids[1], signal.SIGKILL)
    with pytest.raises(RankLostError, match=r"rank 1 (has ended, with code -9|is gone)"):
        start_gang(crew)
    assert_gone(crew.pids)


@pytest.mark.parametrize("ready", [False, True])
def test_no_orphans_of_a_killed_leader(folder, ready):
    leader = subprocess.Popen([sys.executable, str(LEADER), str(folder)], text=True, stdout=subprocess.PIPE)
    try:
        assert leader.stdout is not None
        pids = [int(pid) for pid in leader.stdout.readline().split()]
        if ready:
            assert leader.stdout.readline() == "ready\n"
    finally:
        leader.kill()
        leader.communicate()
    assert len(pids) == 2
    assert_gone(pids)


def assert_gone(pids: list[int]) -> None:
    """They end at once or, where nobody kills them, as soon as they notice."""
    end = time.monotonic() + 60.0
    while alive := [pid for pid in pids if _is_alive(pid)]:
        assert time.monotonic() < end, alive
        time.sleep(0.02)


def _is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
