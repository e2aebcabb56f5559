"""What ``--record-trace`` writes and what is read from it; the fit of measured costs."""

import json
from pathlib import Path

import pytest

from warmroot.cluster.ids import RequestId
from warmroot.cluster.messages import FinishReason, GenerateRequest, TokenDelta
from warmroot.cluster.sampling_params import SamplingParams
from warmroot.deploy.simulate.costs import ReplicaCosts
from warmroot.deploy.simulate.fit import fit_costs
from warmroot.deploy.simulate.trace import read_trace
from warmroot.router.trace_recorder import TraceRecorder


class Generator:
    async def generate(self, request):
        yield TokenDelta(request_id=request.request_id, index=0, token_ids=[1], cached_tokens=16)
        yield TokenDelta(request_id=request.request_id, index=1, token_ids=[2, 3], finish_reason=FinishReason.STOP)


def request(tokens, salt=""):
    return GenerateRequest(request_id=RequestId("r"), prompt_token_ids=tokens, params=SamplingParams(), cache_salt=salt)


async def drain(recorder, *requests):
    for each in requests:
        assert [d.token_ids async for d in recorder.generate(each)] == [[1], [2, 3]]


async def test_a_recording_tells_lengths_and_equal_prefixes_and_nothing_else(tmp_path):
    path, times = tmp_path / "trace.jsonl", iter(range(100, 200))
    recorder = TraceRecorder(Generator(), path, clock=lambda: float(next(times)))
    long = list(range(40))
    await drain(recorder, request(long), request([*long[:32], 9]), request(long, salt="tenant"))
    recorder.close()
    trace = read_trace(path)
    first, second, other = trace.requests
    assert trace.block_tokens == 16
    assert [(r.input_tokens, r.output_tokens, len(r.block_ids)) for r in trace.requests] == [
        (40, 3, 3),
        (33, 3, 3),
        (40, 3, 3),
    ]
    assert first.block_ids[:2] == second.block_ids[:2] and first.block_ids[2] != second.block_ids[2]
    assert not set(first.block_ids) & set(other.block_ids)
    assert (second.arrival_s - first.arrival_s) == 3.0
    row = json.loads(path.read_text().splitlines()[1])
    assert (row["ttft_ms"], row["e2e_ms"], row["cached_tokens"]) == (1000.0, 2000.0, 16)


async def test_two_recordings_of_one_prompt_have_nothing_in_common(tmp_path):
    rows = []
    for name in ("a", "b"):
        recorder = TraceRecorder(Generator(), tmp_path / name)
        await drain(recorder, request(list(range(32))))
        recorder.close()
        rows.append(json.loads((tmp_path / name).read_text().splitlines()[1])["hash_ids"])
    assert not set(rows[0]) & set(rows[1])


def test_a_request_that_was_cut_off_is_not_recorded(tmp_path):
    recorder = TraceRecorder(Generator(), tmp_path / "t")
    recorder.close()
    assert json.loads((tmp_path / "t").read_text()) == {"block_tokens": 16}


async def test_a_full_disk_costs_the_recording_and_no_request(caplog):
    recorder = TraceRecorder(Generator(), Path("/dev/full"))
    await drain(recorder, request([1, 2, 3]), request([4, 5, 6]))
    recorder.close()
    assert caplog.text.count("recording /dev/full: [Errno 28] No space left on device") == 1


def test_costs_are_found_again_from_measurements():
    true = ReplicaCosts(
        prefill_fixed_s=0.01,
        prefill_token_s=1e-3,
        prefill_square_s=2e-7,
        decode_fixed_s=0.004,
        decode_sequence_s=1e-3,
        decode_usage_s=0.05,
        decode_usage_square_s=0.0,
        kv_tokens=10_000,
        max_num_seqs=8,
        max_num_batched_tokens=512,
    )
    prefills = [(n, true.prefill_s(n)) for n in (16, 64, 256, 512)]
    decodes = [(b, c, true.decodes_s(1, b, b * c / 10_000, 0.0)) for b in (1, 4, 8) for c in (64, 256, 1024)]
    found = fit_costs(prefills, decodes, kv_tokens=10_000, max_num_seqs=8, max_num_batched_tokens=512)
    for name in ("prefill_fixed_s", "prefill_token_s", "prefill_square_s", "decode_sequence_s", "decode_usage_s"):
        assert getattr(found, name) == pytest.approx(getattr(true, name), rel=1e-3)
    assert found.prefill_context_s == pytest.approx(4e-7, rel=1e-3)
    linear = fit_costs(
        [(n, n * 1e-3) for n in (10, 100)], decodes, kv_tokens=10_000, max_num_seqs=8, max_num_batched_tokens=512
    )
    assert linear.prefill_s(50) == pytest.approx(0.05, rel=0.01)


def test_costs_survive_a_file(tmp_path):
    costs = ReplicaCosts(kv_tokens=5)
    (tmp_path / "costs.json").write_text(costs.to_json())
    assert ReplicaCosts.read(tmp_path / "costs.json") == costs
