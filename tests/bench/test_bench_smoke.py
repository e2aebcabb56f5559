"""``warmroot bench engine --quick`` runs from end to end and reports what it says it does."""

import json

import pytest

from warmroot.deploy.bench.engine import main


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.timeout(1200)
def test_bench_engine_quick(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--quick", "--json", "--dtype", "fp16", "--streams", "1,4", "--peers", "transformers"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["bench"] == "engine" and result["parameters"]["quick"] is True
    assert set(result["contenders"]) == {"warmroot fp16", "transformers fp32"}
    assert [point["concurrency"] for point in result["streams"]] == [1, 4]
    for point in result["streams"]:
        for figures in point["contenders"].values():
            assert figures["output_tokens_per_s"] > 0 and figures["prefill_tokens_per_s"] > 0
        assert point["ratios"]["warmroot fp16"]["transformers fp32"]["output"] > 0
    shared = result["shared_prefix"]["warmroot fp16"]["contenders"]
    assert shared["warmroot fp16 cached"]["cached_token_rate"] > 0.5
    assert shared["warmroot fp16 uncached"]["cached_token_rate"] == 0
    assert result["zero_hit"]["warmroot fp16"]["pairs"] == 2
    assert len(result["bars"]) == 4
