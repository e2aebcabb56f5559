"""``warmroot plan`` on folders that hold a config.json and nothing else."""

import json

import pytest

from warmroot.deploy.cli import main

LLAMA_2_70B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_hidden_layers": 80,
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "vocab_size": 32000,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "torch_dtype": "float16",
}


@pytest.fixture
def llama(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_2_70B))
    return str(tmp_path)


def plan(capsys, *argv):
    code = main(["plan", *argv, "--json"])
    return code, json.loads(capsys.readouterr().out)


def test_llama_2_70b(llama, capsys):
    code, report = plan(capsys, llama, "--memory", "80GB", "--tp", "4", "--gpu-memory-utilization", "1")
    assert code == 0
    assert report["parameters"] == 68_976_648_192
    assert report["kv_sequence_bytes"] * 4 == 1_342_177_280
    assert report["kv_token_bytes_all_devices"] == 327_680
    assert report["kv_token_bytes_per_layer"] * 4 == 4096
    assert (report["tp"], report["pp"], report["devices"]) == (4, 1, 4)
    assert report["max_sequences"] == (report["num_blocks"] - 1) // 256
    assert report["kv_formats"]["fp32"]["kv_token_bytes"] == 2 * report["kv_formats"]["fp16"]["kv_token_bytes"]
    assert not report["kv_formats"]["int4"]["served"]


def test_what_does_not_fit_says_by_how_much_and_what_would(llama, capsys):
    code, report = plan(capsys, llama, "--memory", "80GB", "--gpu-memory-utilization", "1")
    assert code == 1
    assert (report["fits"], report["limit"], report["smallest_fit"]) == (False, "weights", {"tp": 2, "pp": 1})
    assert report["missing_bytes"] == 2 * 68_976_648_192 + 1_342_177_280 + report["page_bytes"] - 80 * 10**9
    assert main(["plan", llama, "--memory", "80GB"]) == 1
    out = capsys.readouterr().out
    assert "Does not fit: the weights alone do not; each device lacks 62.7 GiB" in out
    assert "Enough: --tp 2 --pp 1." in out


def test_the_table(llama, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    assert main(["plan", llama, "--memory", "80GB", "--tp", "2", "--kv-cache-dtype", "fp16"]) == 0
    out = capsys.readouterr().out
    assert "llama, 69 billion parameters, 80 layers, 64 heads, 8 KV heads of 128" in out
    assert "2,048 B a layer, 163,840 B in all, as fp16" in out
    assert "Fits: 2 device(s) hold the model" in out
    assert "int4 (planned)" in out


@pytest.mark.model
def test_the_packaged_model(capsys):
    code, report = plan(capsys, "smollm2", "--memory", "2GiB", "--quantization", "none")
    assert code == 0
    assert (report["parameters"], report["weight_bytes"]) == (134_515_008, 269_030_016)
    assert (report["dtype"], report["kv_format"]) == ("float16", "fp16")
    assert report["kv_token_bytes"] == 23_040


@pytest.mark.model
@pytest.mark.parametrize(
    ("flags", "name", "bytes_each"), [([], "q4_1", 20 / 32), (["--quantization", "int8"], "int8", 34 / 32)]
)
def test_quantised_weights(capsys, flags, name, bytes_each):
    _, report = plan(capsys, "smollm2", *flags)
    table = 49_152 * 576 * 2  # float16, beside the head that is tied to it
    assert (report["dtype"], report["weight_bytes"]) == (name, int(134_515_008 * bytes_each) + table)


def test_an_unknown_model(capsys):
    assert main(["plan", "./no-such-model"]) == 2
    assert capsys.readouterr().err.startswith("warmroot plan: ./no-such-model: no such file or folder")


def test_this_machines_memory_is_the_default(llama, capsys, monkeypatch):
    monkeypatch.setattr("warmroot.deploy.cli.plan.machine_memory", lambda: 10**12)
    _, report = plan(capsys, llama, "--dtype", "float32")
    assert (report["device_memory"], report["memory_bytes"]) == (10**12, 9 * 10**11)
    assert report["weight_bytes"] == 4 * 68_976_648_192
    assert report["kv_format"] == "fp32"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--tp", "3"], "tp: 3 does not divide the model's 64 attention heads"),
        (["--max-model-len", "5000"], "max_model_len: 5000 is not between 1 and the model's context of 4096"),
        (["--memory", "lots"], "argument --memory: invalid size value: 'lots' (see warmroot plan --help)"),
        (["--gpu-memory-utilization", "2"], "--gpu-memory-utilization: should be less than or equal to 1, not 2.0"),
    ],
)
def test_errors(llama, flags, message, capsys):
    assert main(["plan", llama, *flags]) == 2
    assert capsys.readouterr().err == f"warmroot plan: {message}\n"
