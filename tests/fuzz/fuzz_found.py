"""Inputs that once made a reader fail in a way that it does not document, hang, or allocate without bound."""

import json
import struct
import zlib
from typing import Any

import msgpack
from fuzz_files import LLAMA_CONFIG, llama_gguf
from fuzz_formats import as_gguf, as_json, as_packed

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
ROW = {"timestamp": 1, "input_length": 600, "output_length": 5, "hash_ids": [1]}


def _gguf(**metadata: Any) -> bytes:
    tree = llama_gguf()
    return as_gguf({**tree, "metadata": tree["metadata"] | {key.replace("__", "."): v for key, v in metadata.items()}})


def _gguf_head(num_tensors: int, num_keys: int, rest: bytes = b"") -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, num_tensors, num_keys) + rest


def _config(**facts: Any) -> bytes:
    return as_json({**LLAMA_CONFIG, **facts})


def _hot(*row: Any) -> bytes:
    return zlib.compress(msgpack.packb([row]))


_ARRAYS = struct.pack("<Q", 1) + b"a" + struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 5000
_KEY = struct.pack("<Q", 1) + b"a" + struct.pack("<I", 8)

FOUND: dict[str, list[bytes]] = {
    "gguf": [
        _gguf_head(2**60, 2**60),
        _gguf_head(0, 1, _KEY + struct.pack("<Q", 2**64 - 1)),  # a text that ends behind every file
        _gguf_head(0, 1, struct.pack("<Q", 1) + b"a" + struct.pack("<IIQ", 9, 4, 2**60)),  # 2^60 numbers
        _gguf_head(0, 1, _ARRAYS),  # arrays in arrays
        _gguf(general__alignment=[1]),
        _gguf(llama__block_count=2**31),
        _gguf(llama__attention__head_count=[2]),
        _gguf(llama__attention__head_count_kv=-2),
        _gguf(llama__rope__scaling__type="yarn", llama__rope__scaling__factor=-1.0),
        _gguf(llama__rope__dimension_count=4096),
        _gguf(llama__expert_count=2**40, llama__expert_used_count=1),
        _gguf(tokenizer__ggml__tokens=7),
    ],
    "gguf_tokenizer": [
        _gguf(tokenizer__ggml__eos_token_id=2**31),
        _gguf(tokenizer__ggml__merges=[1, 2]),
        _gguf(tokenizer__ggml__merges=7),
        _gguf(tokenizer__chat_template=[1]),
    ],
    "safetensors_index": [
        b"-0.0",
        b'{"weight_map": {"model.embed_tokens.weight": "../../../etc/passwd"}}',
        b'{"weight_map": {"model.embed_tokens.weight": "/etc/passwd"}}',
        b'{"weight_map": {"model.embed_tokens.weight": "a\\u0000.safetensors"}}',
        b'{"weight_map": {"model.embed_tokens.weight": 7, "b": "one.safetensors"}}',
        b"[" * 100_000,
    ],
    "packed_weights": [
        b"",
        as_packed({"index": {"name": "q4", "table": {}, "linears": 1.0}, "data": 64}),
        as_packed({"index": {"name": "q4", "table": {"dtype": "float16", "shape": [16, 2.5], "data": [0, 80]},
                             "linears": {}}, "data": 128}),
    ],
    "config_json": [
        b"NaN", b"[]", b"[" * 100_000,
        _config(num_hidden_layers=2**31),
        _config(num_hidden_layers=True),
        _config(head_dim={"a": 1}),
        _config(head_dim=1e999),
        _config(num_key_value_heads=-2),
        _config(num_attention_heads=3, num_key_value_heads=2),
        _config(architectures=[[]]),
        _config(architectures=["DeepseekV3ForCausalLM"], n_routed_experts=4, num_experts_per_tok=2, n_group=2,
                topk_group=1, first_k_dense_replace=0, moe_intermediate_size=16, q_lora_rank="16"),
        _config(rope_scaling=[1]),
        _config(quantization_config=[1]),
        _config(quantization_config={"quant_method": []}),
        _config(architectures=["MixtralForCausalLM"], num_local_experts=2**31, num_experts_per_tok=2),
        _config(architectures=["MistralForCausalLM"], sliding_window=float("inf")),
        _config(architectures=["Qwen2MoeForCausalLM"], head_dim=0.5, num_experts=4, moe_intermediate_size=16,
                shared_expert_intermediate_size=16),
    ],
    "generation_config": [b"7", b'{"eos_token_id": [2, ""]}', b'{"eos_token_id": [[2], {}]}', b'{"eos_token_id": -1}'],
    "tokenizer_config": [
        b"-0.0",
        b'{"chat_template": [{"name": []}]}',
        b'{"chat_template": 7}',
        b'{"eos_token": {}}',
        b'{"added_tokens_decoder": 7}',
        b'{"added_tokens_decoder": {"": {}}}',
        b'{"added_tokens_decoder": {"300": {"content": [], "special": 1}}}',
        b'{"bos_token": "", "add_bos_token": true}',
    ],
    "yaml_config": [
        b"when: 2001-32-14t21:59:43.10-05:00\n",
        b"port: !!int ''\n",
        b"port: " + b"[" * 1000,
        b"a: &a [x, x, x, x, x, x, x, x, x]\n" + b"".join(
            b"k%d: &%c [%s]\n" % (n, 98 + n, b", ".join([b"*%c" % (97 + n)] * 9)) for n in range(12)
        ) + b"port: *m\n",
        b"port: &a [x, x, x, x, x, x, x, x, x]\n" + b"x: 1\n",
    ],
    "speculative_config": [b"[" * 1000, b"!!int ''", b"2001-32-14"],
    "trace": [b"\xc3\x1b", b"[]", b'"a"', b"[" * 100_000]
    + [json.dumps({**ROW, **change}).encode() for change in (
        {"timestamp": float("nan")}, {"input_length": float("inf")}, {"hash_ids": [float("inf")]},
    )] + [b'{"block_tokens": 1e999}\n' + json.dumps(ROW).encode()],
    "trace_csv": [
        b"\xf0\xe4,\n1",
        b"TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.68,37400000000,44\n",  # a tuple of all blocks
        b"TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16,374,44" + b"x" * 200_000,
    ],
    "sse": [
        b"H\r\n\r\n",
        b"HTTP/1.1 000 Bad\r\n\r\n",
        HEAD + b"-7\r\nabc\r\n",  # read for ever, for it leads back to itself
        HEAD + b"1_0\r\nabc\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\nabc",
    ],
    "announcement": [b"\x80", b"\x91\xc0", msgpack.packb({"ranks": 7})],
    "model_card": [zlib.compress(msgpack.packb({"names": ["m"], "model": 7})), zlib.compress(b"\xc0"), b"x"],
    "startup_note": [msgpack.packb({"stage": []}), msgpack.packb({"stage": "s", "done": -1})],
    "hot_prefixes": [
        _hot(2**33, 4, b"t" * 16, 1.0, 0.5, ""),  # bytes(n) makes n bytes
        _hot(b"n" * 16, 4, 2**40, 1.0, 0.5, ""),
        _hot(b"n" * 16, 0, b"t" * 16, 1.0, 0.5, ""),
        _hot(b"n" * 16, 2**64 - 1, b"t" * 16, 1.0, 0.5, ""),
        _hot(b"n" * 16, 4, b"t" * 15, 1.0, 0.5, ""),
        _hot(b"n" * 16, 4, b"t" * 16, float("nan"), 0.5, ""),
    ],
    "router_word": [
        msgpack.packb([1, "other", True, {"r0": [float("inf"), 1, 1, 0.5]}, []]),
        msgpack.packb([1, "other", True, {}, [["r0", 0.2, 2**33]]]),
        msgpack.packb([1, "other", True, {}, [["r0", float("nan"), b""]]]),
    ],
}  # fmt: skip
