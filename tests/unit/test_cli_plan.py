"""``warmroot plan`` on folders that hold a config.json and nothing else."""

import json
from math import comb

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
    assert (report["tp"], report["pp"], report["ep"], report["devices"]) == (4, 1, 1, 4)
    assert report["max_sequences"] == (report["num_blocks"] - 1) // 256
    assert report["kv_formats"]["fp32"]["kv_token_bytes"] == 2 * report["kv_formats"]["fp16"]["kv_token_bytes"]
    assert report["kv_formats"]["int4"]["served"]


def test_each_rank_is_an_object(llama, capsys):
    code, report = plan(capsys, llama, "-tp", "4", "-pp", "2", "--memory", "80GB", "--step-tokens", "10")
    assert code == 0
    assert [rank["rank"] for rank in report["ranks"]] == list(range(8))
    rank = report["ranks"][5]
    shown = {key: rank[key] for key in ("stage", "tp_rank", "ep_rank", "first_layer", "num_layers", "heads")}
    assert shown == {"stage": 1, "tp_rank": 1, "ep_rank": 0, "first_layer": 40, "num_layers": 40, "heads": [16, 32]}
    assert (rank["kv_heads"], rank["experts"], rank["has_embedding"], rank["has_head"]) == ([2, 4], [], False, True)
    per_layer = 8192 * (2 * 2048 + 2 * 256) + 3 * 8192 * 7168
    norms = 40 * 2 * 8192 + 8192
    assert rank["parameters"] == 40 * per_layer + norms + 8000 * 8192
    assert rank["weight_bytes"] == 2 * (rank["parameters"] - norms) + 4 * norms
    assert rank["kv_token_bytes"] == 40 * 2 * 2 * 128 * 2
    # On a CPU hidden states are float32: 10 tokens of 8192 elements.
    hidden = 10 * 8192 * 4
    assert rank["sends"] == [
        sends("attention", "all_reduce", 4, 40, hidden, layers=True, share=2 * 3 / 4),
        sends("mlp", "all_reduce", 4, 40, hidden, layers=True, share=2 * 3 / 4),
        sends("logits", "gather", 4, 1, 10 * 8000 * 4),
    ]
    assert [sent["purpose"] for sent in report["ranks"][0]["sends"]] == ["embedding", "attention", "mlp", "hidden"]
    assert report["ranks"][0]["sends"][3] == sends("hidden", "send", 2, 1, hidden)


def sends(purpose, operation, group_size, operations, payload, *, layers=False, share=1.0):
    return {
        "purpose": purpose,
        "operation": operation,
        "group_size": group_size,
        "operations": operations,
        "bytes_per_layer": payload if layers else None,
        "bytes_per_token": operations * payload / 10,
        "bytes_per_step": operations * payload,
        "sent_bytes_per_step": operations * payload * share,
    }


def test_what_does_not_fit_says_by_how_much_and_what_would(llama, capsys):
    code, report = plan(capsys, llama, "--memory", "80GB", "--gpu-memory-utilization", "1")
    assert code == 1
    assert (report["fits"], report["limit"]) == (False, "weights")
    assert report["smallest_fit"] == {"tp": 2, "pp": 1, "ep": 1}
    norms = 161 * 8192
    assert report["weight_bytes"] == 2 * (68_976_648_192 + norms)
    assert report["missing_bytes"] == report["weight_bytes"] + 1_342_177_280 + report["page_bytes"] - 80 * 10**9
    assert main(["plan", llama, "--memory", "80GB"]) == 1
    out = capsys.readouterr().out
    assert "Does not fit: the weights alone do not; a device lacks 62.7 GiB" in out
    assert "Enough: --tp 2 --pp 1." in out


def test_the_table(llama, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    assert main(["plan", llama, "--memory", "80GB", "--tp", "2", "--pp", "2", "--kv-cache-dtype", "fp16"]) == 0
    out = capsys.readouterr().out
    assert "llama, 69 billion parameters, 80 layers, 64 heads, 8 KV heads of 128" in out
    assert "2,048 B a layer, 81,920 B in all, as fp16" in out
    assert cells(out, "0") == ["0", "0", "0-39 + embedding", "32", "4", "32.1 GiB", "81,920 B", "34.9 GiB"]
    assert cells(out, "3") == ["3", "1", "40-79 + head", "32", "4", "32.1 GiB", "81,920 B", "34.9 GiB"]
    assert cells(out, "attention") == ["attention", "all_reduce", "2 ranks", "40", *B_PER_STEP]
    assert "Fits: 4 devices hold the model" in out
    assert "int4" in out and "not served" not in out
    assert max(map(len, out.splitlines())) <= 100


B_PER_STEP = ["1,310,720", "524,288", "20,971,520"]
"""Of 40 layers, 16 tokens and 8192 elements of float32: per token, layer and step."""


def cells(out: str, first: str) -> list[str]:
    """The row of a table that begins so."""
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in out.splitlines()]
    return next(row for row in rows if row[:1] == [first])


def test_ranks_that_are_alike_share_a_row(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    flags = ("--enable-expert-parallel", "--expert-parallel-size", "16", "--device", "cuda", "--memory", "141GB")
    assert main(["plan", folder(tmp_path, DEEPSEEK_V3), "--tp", "8", "--pp", "2", *flags]) == 0
    out = capsys.readouterr().out
    assert cells(out, "0-15")[1:6] == ["0", "0-31 +", "16", "latent", "16"]
    assert cells(out, "16-31")[1:6] == ["1", "32-60 + head", "16", "latent", "16"]
    assert "tp 8 x pp 2, experts over 16, 2 groups with requests of their own" in out
    assert max(map(len, out.splitlines())) <= 100


FAMILY = {"rms_norm_eps": 1e-5, "hidden_act": "silu", "tie_word_embeddings": False, "torch_dtype": "bfloat16"}
LLAMA_3 = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
}
LLAMA_3_8B = LLAMA_3 | {
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
}
LLAMA_3_70B = LLAMA_3 | {
    "num_hidden_layers": 80,
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
}
MIXTRAL_8X7B = {
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 32000,
    "max_position_embeddings": 32768,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "sliding_window": None,
}
QWEN3_30B_A3B = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_hidden_layers": 48,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "use_sliding_window": False,
}
DEEPSEEK_V3 = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "num_hidden_layers": 61,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "vocab_size": 129280,
    "max_position_embeddings": 163840,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "n_group": 8,
    "topk_group": 4,
    "first_k_dense_replace": 3,
    "moe_layer_freq": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
EXPERTS = ("--enable-expert-parallel", "--expert-parallel-size")


def folder(path, config):
    (path / "config.json").write_text(json.dumps(FAMILY | config))
    return str(path)


@pytest.mark.parametrize(
    ("config", "flags", "parameters", "devices", "experts", "kv_token_bytes"),
    [
        (LLAMA_3_8B, (), 8_030_261_248, 1, 0, 131_072),
        (LLAMA_3_70B, ("-tp", "8"), 70_553_706_496, 8, 0, 327_680 // 8),
        (MIXTRAL_8X7B, ("-tp", "2"), 46_702_792_704, 2, 8, 131_072 // 2),
        (MIXTRAL_8X7B, ("-tp", "2", "--enable-expert-parallel"), 46_702_792_704, 2, 4, 131_072 // 2),
        (QWEN3_30B_A3B, (*EXPERTS, "8"), 30_532_122_624, 8, 16, 98_304),
        (DEEPSEEK_V3, ("-tp", "8", "-pp", "2"), 671_026_419_200, 16, 256, 32 * 576 * 2),
        (DEEPSEEK_V3, (*EXPERTS, "16"), 671_026_419_200, 16, 16, 61 * 576 * 2),
    ],
)
def test_known_models(tmp_path, capsys, config, flags, parameters, devices, experts, kv_token_bytes):
    """Parameters as their cards give them; DeepSeek-V3's without the layer that predicts a second token."""
    _, report = plan(capsys, folder(tmp_path, config), "--device", "cuda", "--memory", "141GB", *flags)
    first = report["ranks"][0]
    assert (report["parameters"], len(report["ranks"])) == (parameters, devices)
    assert (len(first["experts"]), first["kv_token_bytes"]) == (experts, kv_token_bytes)
    assert report["dtype"] == "bfloat16"
    assert report["weight_bytes_all_devices"] >= 2 * parameters
    assert report["weight_bytes"] == pytest.approx(2 * first["parameters"], rel=0.003)  # gates and norms are float32


def test_tokens_of_experts(tmp_path, capsys):
    """Of 128 experts a rank has 16: it is spared a token with chance C(112, 8) / C(128, 8)."""
    flags = (*EXPERTS, "8", "--step-tokens", "10")
    _, report = plan(capsys, folder(tmp_path, QWEN3_30B_A3B), "--device", "cuda", "--memory", "80GB", *flags)
    sent = {sent["purpose"]: sent for sent in report["ranks"][3]["sends"]}
    reach = 1 - comb(112, 8) / comb(128, 8)
    assert set(sent) == {"counts", "dispatch", "combine"}
    assert {transfer["operations"] for transfer in sent.values()} == {48}
    assert sent["dispatch"]["bytes_per_layer"] == pytest.approx(10 * 7 * reach * (2048 * 2 + 8 * 8))
    assert sent["combine"]["bytes_per_token"] == pytest.approx(48 * 7 * reach * 2048 * 2)
    assert report["max_sequences"] % 8 == 0


def test_a_gpu_ties_the_head_and_a_cpu_packs_it(tmp_path, capsys):
    model = folder(tmp_path, LLAMA_3_8B | {"tie_word_embeddings": True})
    _, cpu = plan(capsys, model, "--memory", "80GB")
    _, gpu = plan(capsys, model, "--memory", "80GB", "--device", "cuda")
    assert cpu["weight_bytes"] - gpu["weight_bytes"] == 128_256 * 4096 * 2
    assert (cpu["step"], gpu["step"]) == (
        {"tokens": 16, "activation_bytes": 4},
        {"tokens": 16, "activation_bytes": 2},
    )


def test_float16_may_be_there_twice_on_a_cpu(tmp_path, capsys):
    model = folder(tmp_path, MIXTRAL_8X7B)
    _, report = plan(capsys, model, "--memory", "141GB", "--dtype", "float16")
    attention, head = 32 * 4096 * (4096 * 2 + 1024 * 2), 32000 * 4096
    assert report["copied_weight_bytes"] == report["ranks"][0]["copied_weight_bytes"] == 2 * (attention + head)
    assert main(["plan", model, "--memory", "141GB"]) == 0
    assert "2.74 GiB more where FBGEMM is faster" in " ".join(capsys.readouterr().out.replace("│", " ").split())
    for flags in (("--device", "cuda"), ("--quantization", "int8"), ("--dtype", "bfloat16")):
        assert plan(capsys, model, "--memory", "141GB", *flags)[1]["copied_weight_bytes"] == 0


@pytest.mark.model
@pytest.mark.parametrize(
    ("flags", "name", "weight_bytes"),
    [
        ((), "q4_1+q8_0", 153_059_328),
        (("--quantization", "int8"), "int8", 199_507_968),
        (("--quantization", "none"), "float16", 325_582_848),
        (("--dtype", "float32"), "float32", 651_165_696),
    ],
)
def test_the_packaged_model(capsys, flags, name, weight_bytes):
    """Linears and table as packing makes them (see test_plan_weights.py), and 61 norms of float32."""
    code, report = plan(capsys, "smollm2", "--memory", "2GiB", *flags)
    assert code == 0
    assert (report["dtype"], report["weight_bytes"]) == (name, weight_bytes + 61 * 576 * 4)
    assert report["kv_token_bytes"] == (46_080 if name == "float32" else 23_040)


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
        (
            ["--tp", "24"],
            "tensor_parallel_size: 24 ranks cannot share the model's 64 attention heads over 8 KV heads;"
            " 1, 2, 3, 4, 5, 6, 7, 8, 16, 32, 64 fit",
        ),
        (
            ["--pp", "81"],
            "pipeline_parallel_size: 81 stages are more than the model's 80 layers; at most 80 fit",
        ),
        (["--tp", "0"], "--tensor-parallel-size: should be greater than or equal to 1, not 0"),
        (["--expert-parallel-size", "2"], "--expert-parallel-size: needs enable_expert_parallel"),
        (
            ["--tp", "2", "--enable-expert-parallel"],
            "expert_parallel_size: the model (llama) has no experts; leave expert parallelism away",
        ),
        (
            ["--tp", "3", "--enable-expert-parallel", "--expert-parallel-size", "2"],
            "--expert-parallel-size: 2 neither divides tensor_parallel_size (3) nor is a multiple of it;"
            " 1, 3, 6, 9, ... fit",
        ),
        (
            ["--step-tokens", "0"],
            "argument --step-tokens: should be greater than or equal to 1, not 0 (see warmroot plan --help)",
        ),
        (["--max-model-len", "5000"], "max_model_len: 5000 is not between 1 and the model's context of 4096"),
        (["--memory", "lots"], "argument --memory: invalid size value: 'lots' (see warmroot plan --help)"),
        (["--gpu-memory-utilization", "2"], "--gpu-memory-utilization: should be less than or equal to 1, not 2.0"),
    ],
)
def test_errors(llama, flags, message, capsys):
    assert main(["plan", llama, *flags]) == 2
    assert capsys.readouterr().err == f"warmroot plan: {message}\n"


def test_experts_that_cannot_be_spread(tmp_path, capsys):
    assert main(["plan", folder(tmp_path, QWEN3_30B_A3B), *EXPERTS, "12"]) == 2
    assert capsys.readouterr().err == (
        "warmroot plan: expert_parallel_size: 12 ranks do not divide the model's 128 experts;"
        " 1, 2, 4, 8, 16, 32, 64, 128 do, or set num_redundant_experts to 4\n"
    )
    flags = (*EXPERTS, "12", "--num-redundant-experts", "4", "--device", "cuda", "--memory", "80GB")
    _, report = plan(capsys, str(tmp_path), *flags)
    assert {len(rank["experts"]) for rank in report["ranks"]} == {11}
    assert report["num_redundant_experts"] == 4


def test_drafts_take_memory_where_tokens_are_sampled(tmp_path, capsys):
    small = {"num_hidden_layers": 4, "hidden_size": 1024, "intermediate_size": 2048, "num_attention_heads": 8}
    for name, config in (("model", LLAMA_2_70B), ("small", LLAMA_2_70B | small)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config))
    heads = {"model_type": "medusa", "num_heads": 3, "hidden_size": 8192, "vocab_size": 32000}
    (tmp_path / "heads").mkdir()
    (tmp_path / "heads" / "config.json").write_text(json.dumps(heads | {"truncated_vocab_size": 4096}))

    def ranks(*argv, **speculation):
        flags = ["-tp", "4", "-pp", "2", "--memory", "80GB", "--device", "cuda", *argv]
        if speculation:
            flags += ["--speculative-config", json.dumps(speculation)]
        code, report = plan(capsys, str(tmp_path / "model"), *flags)
        assert code == 0
        return report["ranks"]

    before = ranks()
    assert {rank["draft_weight_bytes"] for rank in before} == {0}
    page = before[4]["page_bytes"]
    for speculation, weights, more in (
        ({"method": "ngram"}, 0, 0),
        ({"method": "medusa", "model": str(tmp_path / "heads")}, 2 * 8192 * (3 * 8192 + 3 * 4096) + 4 * 3 * 8192, 0),
        # Keys and values of 16 tokens, 8 heads of 128, in 16 bits, for each of its layers.
        ({"method": "draft_model", "model": str(tmp_path / "small")}, None, 4 * 2 * 16 * 8 * 128 * 2),
        ({"method": "layer_skip", "num_layers": 10}, None, 10 * 2 * 16 * 8 * 128 * 2),
    ):
        found = ranks(**speculation)
        assert [rank["draft_weight_bytes"] > 0 for rank in found] == [rank == 4 and weights != 0 for rank in range(8)]
        assert weights in (None, found[4]["draft_weight_bytes"])
        assert found[4]["page_bytes"] == page + more
        assert found[4]["kv_bytes"] == before[4]["kv_bytes"] - found[4]["draft_weight_bytes"]
        assert found[4]["num_blocks"] < before[4]["num_blocks"] or speculation["method"] == "ngram"
    layers = ranks(method="layer_skip", num_layers=10)[4]["draft_weight_bytes"]
    # Ten whole layers, embedding and head; norms are float32.
    assert layers == 2 * (10 * (2 * 8192**2 + 2 * 8192 * 1024 + 3 * 8192 * 28672) + 2 * 32000 * 8192) + 4 * 8192 * 21


def test_open_pages_are_told(llama, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    argv = [llama, "-tp", "8", "--memory", "80GB", "--kv-cache-dtype", "int8", "--max-num-seqs", "64"]
    code, report = plan(capsys, *argv)
    assert code == 0
    assert report["open_page_bytes"] == 80 * 2 * 128 * 16
    assert report["open_pages"] == int(1.25 * (3 * 64 + 2048 // 16 + 32))
    assert main(["plan", *argv]) == 0
    assert "440 that tokens still join" in " ".join(capsys.readouterr().out.split())
