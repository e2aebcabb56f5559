"""``warmroot bench engine`` and ``curves`` run with ``--quick`` from end to end and report what they say they do."""

import json
from pathlib import Path

import pytest

from warmroot.deploy.bench import curves
from warmroot.deploy.bench.engine import main


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.timeout(1200)
def test_bench_engine_quick(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--quick", "--json", "--dtype", "fp16", "--streams", "1,4", "--peers", "transformers"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["bench"] == "engine" and result["parameters"]["quick"] is True
    assert list(result["heats"]) == ["16-bit"]
    heat = result["heats"]["16-bit"]
    assert set(heat["contenders"]) == {"warmroot fp16", "transformers fp32"}
    assert [point["concurrency"] for point in heat["streams"]] == [1, 4]
    for point in heat["streams"]:
        for figures in point["contenders"].values():
            assert figures["output_tokens_per_s"] > 0 and figures["prefill_tokens_per_s"] > 0
        assert point["ratios"]["warmroot fp16"]["transformers fp32"]["output"] > 0
    shared = heat["shared_prefix"]["warmroot fp16"]["contenders"]
    assert shared["warmroot fp16 cached"]["cached_token_rate"] > 0.5
    assert shared["warmroot fp16 uncached"]["cached_token_rate"] == 0
    assert result["zero_hit"]["pairs"] == 2
    assert result["quality_text"]["reference"] == "transformers fp32"
    quality = heat["quality"]["warmroot fp16"]
    assert quality["argmax_agreement"] > 0.98 and abs(quality["perplexity_ratio"] - 1) < 0.001
    step = heat["step"]["warmroot fp16"]
    assert 0 < step["kernels_s"] < step["step_s"]
    assert {name.partition(":")[0].partition(" /")[0] for name in result["bars"]} == {"warmroot fp16"}
    assert len(result["bars"]) == 6


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.timeout(600)
def test_bench_curves_quick(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    plot = tmp_path / "curves.png"
    pytest.importorskip("matplotlib")
    assert curves.main(["--quick", "--json", "--dtype", "fp16,file", "--threads", "1", "--plot", str(plot)]) == 0
    result = json.loads(capsys.readouterr().out)
    assert [curve["precision"] for curve in result["curves"]] == ["fp16", "q4_1"]
    for curve in result["curves"]:
        points = [*curve["batch"], *curve["context"], *curve["prefill"]]
        assert all(point["tokens_per_s"] > 0 and point["steps"] >= 3 for point in points)
    assert plot.stat().st_size > 10_000
