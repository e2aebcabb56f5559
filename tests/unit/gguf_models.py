"""Small Llama files whose linears are stored in any of GGUF's block formats."""

import gguf
import numpy as np

Storage = gguf.GGMLQuantizationType
HIDDEN, INNER, HEADS, KV_HEADS, VOCAB, LAYERS = 256, 512, 4, 2, 96, 2
HEAD_DIM = HIDDEN // HEADS
SHAPES = {
    "attn_q": (HIDDEN, HIDDEN),
    "attn_k": (KV_HEADS * HEAD_DIM, HIDDEN),
    "attn_v": (KV_HEADS * HEAD_DIM, HIDDEN),
    "attn_output": (HIDDEN, HIDDEN),
    "ffn_gate": (INNER, HIDDEN),
    "ffn_up": (INNER, HIDDEN),
    "ffn_down": (HIDDEN, INNER),
}


def random_blocks(rng, shape, storage):
    """Blocks that gguf cannot quantise to are made of random bits with small scales."""
    if storage not in (Storage.Q4_K, Storage.Q5_K, Storage.Q6_K):
        return gguf.quantize(0.08 * rng.standard_normal(shape, dtype=np.float32), storage)
    size, block_bytes = gguf.GGML_QUANT_SIZES[storage]
    blocks = rng.integers(0, 256, (shape[0], shape[1] // size, block_bytes), dtype=np.uint8)
    scale = np.frombuffer(np.float16(2e-4).tobytes(), dtype=np.uint8)
    if storage == Storage.Q6_K:
        blocks[..., -2:] = scale
    else:
        blocks[..., :2] = blocks[..., 2:4] = scale
    return blocks.reshape(shape[0], -1)


def write_model(path, storages, embedding=Storage.Q8_0):
    """A Llama file whose linears are stored as ``storages`` says, a name or "" for all others."""
    rng = np.random.default_rng(0)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(LAYERS)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(VOCAB)
    writer.add_eos_token_id(2)

    def add(name, shape, storage):
        writer.add_tensor(name, random_blocks(rng, shape, storage), raw_dtype=storage)

    add("token_embd.weight", (VOCAB, HIDDEN), embedding)
    for layer in range(LAYERS):
        for name, shape in SHAPES.items():
            add(f"blk.{layer}.{name}.weight", shape, storages.get(name, storages[""]))
        for name in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"blk.{layer}.{name}.weight", np.ones(HIDDEN, dtype=np.float32))
    writer.add_tensor("output_norm.weight", np.ones(HIDDEN, dtype=np.float32))
    for write in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file):
        write()
    writer.close()
    return path
