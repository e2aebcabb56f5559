"""A small model with a tokenizer and a chat template, in a folder, for what is trained on it."""

import json
from pathlib import Path

import torch
import transformers
from small_tokenizers import byte_level

VOCAB = 320


def small_llama(num_layers: int = 3, **values) -> transformers.PreTrainedModel:
    torch.manual_seed(3)
    config = transformers.LlamaConfig(
        **{
            "vocab_size": VOCAB,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": num_layers,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 512,
            "tie_word_embeddings": True,
            "eos_token_id": byte_level().eos_token_id,
            **values,
        }
    )
    model = transformers.LlamaForCausalLM(config).eval()
    for parameter in model.parameters():
        parameter.data.normal_(0.0, 0.25)
    return model


def write_small_llama(folder: Path, **values) -> transformers.PreTrainedModel:
    model = small_llama(**values)
    model.save_pretrained(folder)
    tokenizer = byte_level()
    assert tokenizer.vocab_size <= VOCAB
    card = tokenizer.to_dict()
    (folder / "tokenizer.json").write_text(card["tokenizer"])
    config = {**card["special_tokens"], "chat_template": card["chat_template"]}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return model
