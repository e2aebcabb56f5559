"""What ``quantization_config`` of published checkpoints says, and what is refused by name."""

import json

import pytest

from warmroot.actors.models.spec import read_quantization, read_spec
from warmroot.cluster.errors import ConfigError
from warmroot.cluster.quantization_config import QuantizationConfig
from warmroot.cluster.weight_formats import grouped_format

GPTQ = {
    "bits": 4,
    "checkpoint_format": "gptq",
    "damp_percent": 0.01,
    "desc_act": True,
    "group_size": 128,
    "lm_head": False,
    "meta": {"quantizer": ["gptqmodel:1.4.0"]},
    "model_file_base_name": None,
    "quant_method": "gptq",
    "static_groups": False,
    "sym": True,
    "true_sequential": True,
}
AWQ = {
    "bits": 4,
    "group_size": 64,
    "modules_to_not_convert": None,
    "quant_method": "awq",
    "version": "gemm",
    "zero_point": True,
}


def test_what_tools_write():
    gptq, awq = QuantizationConfig.of(GPTQ), QuantizationConfig.of(AWQ)
    assert (gptq.name, gptq.has_zeros, awq.name, awq.has_zeros) == ("gptq-int4-g128", False, "awq-int4-g64", True)
    assert QuantizationConfig.of(GPTQ | {"group_size": -1, "bits": 8, "sym": False}).name == "gptq-int8"
    older = {"quant_method": "awq", "w_bit": 4, "q_group_size": 128, "zero_point": True, "version": "GEMM"}
    assert QuantizationConfig.of(older).name == "awq-int4-g128"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"quant_method": "fp8"}, "weights quantised with fp8 are not supported; gptq and awq are"),
        ({}, "weights quantised with no named method"),
        (GPTQ | {"bits": 3}, "gptq with bits 3 is not supported; 4 and 8 are"),
        (AWQ | {"bits": 8}, "awq with bits 8 is not supported; 4 is"),
        (GPTQ | {"group_size": 48}, "gptq with group_size 48 is not supported; -1, 32, 64 and 128 are"),
        (GPTQ | {"checkpoint_format": "marlin"}, "checkpoint_format marlin is not supported; gptq and gptq_v2 are"),
        (GPTQ | {"dynamic": {"-:.*down": {}}}, "dynamic is not supported"),
        (GPTQ | {"desc_act": "perhaps"}, "gptq with desc_act: input should be a valid boolean"),
        (AWQ | {"version": "gemv"}, "version gemv is not supported; gemm is"),
        (AWQ | {"zero_point": False}, "zero_point false is not supported"),
    ],
)
def test_refusals_name_the_setting(settings, message):
    with pytest.raises(ConfigError, match=message) as caught:
        QuantizationConfig.of(settings)
    assert caught.value.param == "quantization"


def test_which_linears_are_quantised():
    gptq = QuantizationConfig.of(GPTQ)
    names = [f"model.layers.0.{part}.weight" for part in ("self_attn.q_proj", "mlp.down_proj")]
    assert [gptq.quantises(name) for name in (*names, "lm_head.weight", "model.embed_tokens.weight")] == [
        True,
        True,
        False,
        False,
    ]
    assert QuantizationConfig.of(GPTQ | {"lm_head": True}).quantises("lm_head.weight")
    some = QuantizationConfig.of(GPTQ | {"modules_in_block_to_quantize": [["self_attn.q_proj", "self_attn.k_proj"]]})
    assert [some.quantises(name) for name in names] == [True, False]
    others = QuantizationConfig.of(AWQ | {"modules_to_not_convert": ["down_proj"]})
    assert [others.quantises(name) for name in names] == [True, False]


def test_bytes_of_codes():
    """4 bits and, for 32 inputs, a scale and a zero of 16 bits: 0.31 of 16-bit weights, 0.28 without zeros."""
    for settings, share in ((AWQ, 0.3125), (GPTQ, 0.28125), (GPTQ | {"bits": 8, "sym": False}, 0.5625)):
        fmt = grouped_format(QuantizationConfig.of(settings))
        assert fmt.matrix_bytes(4096, 4096) == share * 2 * 4096 * 4096


def test_a_folder_says_so_in_one_of_two_files(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}))
    assert read_quantization(tmp_path) is None
    older = {key: GPTQ[key] for key in ("bits", "group_size", "desc_act", "sym")}
    (tmp_path / "quantize_config.json").write_text(json.dumps(older))
    assert read_quantization(tmp_path).name == "gptq-int4-g128"
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": AWQ}))
    assert read_quantization(tmp_path).name == "awq-int4-g64"
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": {"quant_method": "bitsandbytes"}}))
    with pytest.raises(ConfigError, match="bitsandbytes are not supported"):
        read_spec(tmp_path)
