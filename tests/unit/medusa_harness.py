"""A small model, heads for it that are often right, and engines that draft with them."""

import json
import time
from pathlib import Path

import torch
import transformers
from safetensors.torch import save_file

from warmroot.actors.engine.config import EngineConfig
from warmroot.actors.engine.engine import Engine
from warmroot.actors.models.decoder import Decoder
from warmroot.actors.runner.load_drafter import drafter_of
from warmroot.actors.runner.runner import ModelRunner
from warmroot.cluster.ids import RequestId
from warmroot.cluster.kv_layout import KvLayout
from warmroot.cluster.messages import GenerateRequest, TokenDelta
from warmroot.cluster.sampling_params import SamplingParams
from warmroot.cluster.speculative_config import SpeculativeConfig
from warmroot.kv_store.hashing import namespace_root

VOCAB, HIDDEN = 24, 32
SMALL = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "eos_token_id": 2,
}


def save_model(folder: Path, model_class: str = "LlamaForCausalLM", spread: float = 0.25, **config):
    """Random weights, far from a fresh initialisation."""
    kind = getattr(transformers, model_class)
    torch.manual_seed(3)
    model = kind(kind.config_class(**SMALL | config)).eval()
    for parameter in model.parameters():
        parameter.data.normal_(0.0, spread)
    model.save_pretrained(folder)
    return model


@torch.no_grad()
def texts_of(model, *, num_texts: int = 24, length: int = 60) -> list[list[int]]:
    """What the model writes by itself."""
    starts = torch.randint(3, VOCAB, (num_texts, 4), generator=torch.Generator().manual_seed(0))
    return model.generate(starts, max_new_tokens=length, do_sample=False, eos_token_id=None, pad_token_id=0).tolist()


@torch.no_grad()
def fitted_outputs(model, texts: list[list[int]], num_heads: int) -> list[torch.Tensor]:
    """For each head an output layer [vocab, hidden]: least squares from the texts' hidden states to what follows."""
    vocab_size = model.get_output_embeddings().weight.shape[0]
    hidden = [model.model(torch.tensor([text])).last_hidden_state[0] for text in texts]
    outputs = []
    for ahead in range(2, num_heads + 2):
        x = torch.cat([states[:-ahead] for states in hidden])
        following = torch.cat([torch.tensor(text[ahead:]) for text in texts])
        wanted = torch.nn.functional.one_hot(following, vocab_size).float()
        gram = x.T @ x + 0.01 * torch.eye(x.shape[1])
        outputs.append(20.0 * torch.linalg.solve(gram, x.T @ wanted).T.contiguous())
    return outputs


def save_heads(folder: Path, outputs: list[torch.Tensor], *, token_map=None, shared=False, blocks=0.0, **changed):
    """A checkpoint with these output layers, of tokens in ``token_map`` only, and blocks of random weights."""
    folder.mkdir(parents=True, exist_ok=True)
    vocab_size, hidden = outputs[0].shape
    config = {
        "model_type": "medusa",
        "num_heads": len(outputs),
        "num_hidden_layers": 1,
        "hidden_size": hidden,
        "vocab_size": vocab_size,
        "original_lm_head": shared,
    }
    generator = torch.Generator().manual_seed(1)
    tensors = {}
    for index, weight in enumerate(outputs):
        tensors[f"blocks.{index}.layers.0.weight"] = blocks * torch.randn(hidden, hidden, generator=generator)
        tensors[f"blocks.{index}.layers.0.bias"] = blocks * torch.randn(hidden, generator=generator)
        name = "lm_head.weight" if shared else f"lm_heads.{index}.weight"
        tensors[name] = (weight if token_map is None else weight[token_map]).contiguous()
    if token_map is not None:
        config["truncated_vocab_size"] = len(token_map)
        tensors["token_map"] = torch.tensor(token_map)
    (folder / "config.json").write_text(json.dumps(config | changed))
    save_file(tensors, folder / "model.safetensors")
    return folder


def medusa(folder: Path, count: int = 8, **options) -> SpeculativeConfig:
    options = {"adaptive": False} | options
    return SpeculativeConfig(method="medusa", model=str(folder), num_speculative_tokens=count, **options)


def make_engine(
    decoder: Decoder, speculation: SpeculativeConfig | None, *, num_blocks: int = 300, kv_dtype=None, **options
) -> Engine:
    layout = KvLayout.of(decoder.spec.layer_windows, options.pop("block_size", 4))
    make_drafter = None
    if speculation is not None:
        kv = kv_dtype or decoder.dtype
        make_drafter = drafter_of(speculation, decoder, layout, num_blocks, kv, None, Path(speculation.model))
    runner = ModelRunner(
        decoder,
        layout,
        num_blocks,
        kv_dtype=kv_dtype,
        make_drafter=make_drafter,
        acceptance_threshold=None if speculation is None else speculation.acceptance_threshold,
    )
    options = {"max_num_seqs": 16, "eos_token_ids": runner.eos_token_ids, "speculation": speculation} | options
    return Engine(runner, EngineConfig(max_model_len=200, **options), time.monotonic, namespace_root("medusa"))


def run(engine: Engine, requests: dict[str, tuple[list[int], dict]]) -> dict[str, list[TokenDelta]]:
    """Answers to named (prompt, sampling parameters), all at once."""
    deltas: dict[str, list[TokenDelta]] = {name: [] for name in requests}
    for name, (prompt, params) in requests.items():
        engine.add(
            GenerateRequest(request_id=RequestId(name), prompt_token_ids=prompt, params=SamplingParams(**params))
        )
    while engine.has_work:
        for delta in engine.step():
            assert delta.error is None, delta.error
            deltas[delta.request_id].append(delta)
    assert engine.cache.pool.num_used == 0
    return deltas


def tokens(deltas: dict[str, list[TokenDelta]]) -> dict[str, list[int]]:
    return {name: [token for delta in own for token in delta.token_ids] for name, own in deltas.items()}
