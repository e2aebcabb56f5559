"""A small Llama folder to quantise, and readers of checkpoints written from the formats' own definitions."""

import json

import torch
from safetensors import safe_open
from safetensors.torch import save_file

HIDDEN, INNER, HEADS, KV_HEADS, VOCAB, LAYERS = 64, 160, 4, 2, 96, 2
HEAD_DIM = HIDDEN // HEADS
SHAPES = {
    "self_attn.q_proj": (HIDDEN, HIDDEN),
    "self_attn.k_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
    "self_attn.v_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
    "self_attn.o_proj": (HIDDEN, HIDDEN),
    "mlp.gate_proj": (INNER, HIDDEN),
    "mlp.up_proj": (INNER, HIDDEN),
    "mlp.down_proj": (HIDDEN, INNER),
}
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "vocab_size": VOCAB,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
}


def write_model(folder, bias=False, tokenizer=False):
    """Random, with some loud channels, as real models have."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape, spread=0.2):
        return spread * torch.randn(shape, generator=generator)

    loud = 1.0 + 6.0 * (torch.rand(HIDDEN, generator=generator) > 0.9)
    tensors = {"model.embed_tokens.weight": normal(VOCAB, HIDDEN, spread=0.6), "model.norm.weight": torch.ones(HIDDEN)}
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        for name, shape in SHAPES.items():
            tensors[f"{prefix}{name}.weight"] = normal(*shape)
            if bias:
                tensors[f"{prefix}{name}.bias"] = normal(shape[0])
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{prefix}{norm}.weight"] = loud.clone()
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(CONFIG | {"attention_bias": bias, "mlp_bias": bias}))
    if tokenizer:
        write_tokenizer(folder)
    return folder


def write_tokenizer(folder):
    """Of bytes, some of them alike: any text has tokens, in the range of a small vocabulary."""
    vocab = {"t0": 0} | {chr(ordinal): ordinal - 31 for ordinal in range(32, 32 + VOCAB - 1)}
    model = {"type": "WordLevel", "vocab": vocab, "unk_token": "t0"}
    split = {"type": "Split", "pattern": {"Regex": "."}, "behavior": "Isolated", "invert": False}
    (folder / "tokenizer.json").write_text(
        json.dumps({"version": "1.0", "model": model, "pre_tokenizer": split, "added_tokens": []})
    )


def samples(count=8, length=32):
    generator = torch.Generator().manual_seed(1)
    return torch.randint(VOCAB, (count, length), generator=generator).tolist()


def read_tensors(folder):
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            found |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    return found


def field(word, bits, place):
    """Bits of a word of int32."""
    return ((int(word) & 0xFFFFFFFF) >> (bits * place)) & (2**bits - 1)


def gptq_weight(tensors, module, bits):
    """AutoGPTQ v1: w[o, i] = scale[g, o] * (code[i, o] - (zero[g, o] + 1)), g = g_idx[i]; one value at a time."""
    qweight, qzeros, scales, g_idx = (tensors[f"{module}.{name}"] for name in ("qweight", "qzeros", "scales", "g_idx"))
    pack = 32 // bits
    weight = torch.empty(qweight.shape[1], qweight.shape[0] * pack)
    for o in range(weight.shape[0]):
        for i in range(weight.shape[1]):
            group = int(g_idx[i])
            code = field(qweight[i // pack, o], bits, i % pack)
            zero = field(qzeros[group, o // pack], bits, o % pack) + 1
            weight[o, i] = float(scales[group, o]) * (code - zero)
    return weight


def awq_weight(tensors, module, group_size):
    """AutoAWQ GEMM: column o of a word of eight is its nibble (0, 4, 1, 5, 2, 6, 3, 7)[o]; one value at a time."""
    qweight, qzeros, scales = (tensors[f"{module}.{name}"] for name in ("qweight", "qzeros", "scales"))
    places = (0, 4, 1, 5, 2, 6, 3, 7)
    weight = torch.empty(qweight.shape[1] * 8, qweight.shape[0])
    for o in range(weight.shape[0]):
        for i in range(weight.shape[1]):
            group = i // group_size
            code = field(qweight[i, o // 8], 4, places[o % 8])
            zero = field(qzeros[group, o // 8], 4, places[o % 8])
            weight[o, i] = float(scales[group, o]) * (code - zero)
    return weight


def dequantised(folder, target):
    """The checkpoint as a plain folder in float32, by the readers above."""
    config = json.loads((folder / "config.json").read_text())
    quantization = config.pop("quantization_config")
    tensors = read_tensors(folder)
    plain = {name: tensor.float() for name, tensor in tensors.items() if tensor.dtype == torch.float16}
    plain = {name: tensor for name, tensor in plain.items() if not name.endswith(".scales")}
    for name in [name for name in tensors if name.endswith(".qweight")]:
        module = name.removesuffix(".qweight")
        if quantization["quant_method"] == "gptq":
            plain[f"{module}.weight"] = gptq_weight(tensors, module, quantization["bits"])
        else:
            size = quantization["group_size"]
            plain[f"{module}.weight"] = awq_weight(tensors, module, tensors[name].shape[0] if size == -1 else size)
    target.mkdir()
    save_file(plain, target / "model.safetensors")
    (target / "config.json").write_text(json.dumps(config | {"dtype": "float32"}))
    return target
