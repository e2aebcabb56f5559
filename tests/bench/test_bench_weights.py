"""``warmroot bench weights --quick`` on a small model, from quantising to the report."""

import json
import sys
from argparse import Namespace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))
import quantize_harness as harness

from warmroot.actors.models.source import resolve_model
from warmroot.actors.models.spec import read_spec
from warmroot.cluster.errors import ConfigError, ModelLoadError
from warmroot.deploy.bench.weights import main
from warmroot.deploy.bench.weights_bytes import weight_bytes
from warmroot.deploy.bench.weights_checkpoints import checkpoint, fitting_group


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_every_form_is_measured(tmp_path, capsys):
    model = harness.write_model(tmp_path / "model", tokenizer=True)
    flags = ["--threads", "1", "--streams", "1,2", "--samples", "4", "--group-size", "32", "--scratch", str(tmp_path)]
    assert main([str(model), "--quick", "--json", *flags]) == 0
    result = json.loads(capsys.readouterr().out)
    forms = ["fp16", "int8", "int4", "int4-g128", "gptq", "awq"]
    names = [f"warmroot {form}" for form in forms]
    assert list(result["bytes"]) == forms
    assert result["bytes"]["fp16"]["linears_share"] == 1 and 0.25 < result["bytes"]["gptq"]["linears_share"] < 0.35
    assert list(result["load_s"]) == list(result["quality"]) == list(result["contenders"]) == names
    assert result["contenders"]["warmroot gptq"]["weights"] == "gptq-int4-g32"
    assert result["contenders"]["warmroot awq"]["weights"] == "awq-int4-g32"
    assert all(seconds["first"] > 0 and seconds["again"] > 0 for seconds in result["load_s"].values())
    assert result["quality"]["warmroot fp16"]["perplexity_ratio"] == 1
    assert [point["concurrency"] for point in result["streams"]] == [1, 2]
    for point in result["streams"]:
        assert all(figures["prefill_tokens_per_s"] > 0 for figures in point["contenders"].values())
    wanted = {"perplexity, int8 / fp16", "int8 / fp16, 1 streams", "int8 / fp16, 2 streams"}
    assert wanted < set(result["bars"]) and len(result["bars"]) == 6
    assert (tmp_path / "model-awq-g32" / "config.json").is_file()


def test_checkpoints_are_what_their_flags_say(tmp_path):
    model = harness.write_model(tmp_path / "model")
    with pytest.raises(ConfigError, match=f"--awq: {model} holds no awq checkpoint"):
        checkpoint("awq", model, Namespace(awq=str(model)), print)


def test_bytes_of_the_packaged_model():
    try:
        path = resolve_model("smollm2")
    except ModelLoadError as error:
        pytest.skip(str(error))
    half, int8, int4 = (weight_bytes(path, form) for form in ("fp16", "int8", "int4"))
    elements = 30 * (576 * (576 + 2 * 192) + 576 * 576 + 3 * 576 * 1536)
    assert half.linears == 2 * elements
    assert int8.linears / half.linears == pytest.approx(8.5 / 16, rel=0.01)
    assert 4.25 / 16 < int4.linears / half.linears < 0.35
    assert half.total > half.linears + 2 * 2 * 49152 * 576


def test_the_largest_group_that_awq_can_cut(tmp_path):
    try:
        spec = read_spec(resolve_model("smollm2"))
    except ModelLoadError as error:
        pytest.skip(str(error))
    assert [fitting_group(spec, wanted) for wanted in (128, 64, 32)] == [64, 64, 32]
    small = read_spec(harness.write_model(tmp_path / "model"))
    assert fitting_group(small, 128) == 32
