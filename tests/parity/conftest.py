"""Reference models to compare with: small random ones of every family, and the packaged SmolLM2."""

from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
import transformers
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from warmroot.actors.attention.interface import AttentionMetadata
from warmroot.actors.attention.kv_memory import KvMemory
from warmroot.actors.models.decoder import Decoder
from warmroot.actors.models.loader import load_model
from warmroot.actors.models.source import resolve_model
from warmroot.cluster.errors import ModelLoadError
from warmroot.cluster.kv_layout import KvLayout

BLOCK_SIZE = 4
SMALL = {
    "vocab_size": 256,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 4,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
MIXED = ["full_attention", "sliding_attention", "sliding_attention", "full_attention", "sliding_attention"]


@dataclass(frozen=True)
class Family:
    architecture: str
    config: dict = field(default_factory=dict)

    def build(self) -> transformers.PreTrainedModel:
        model_class = getattr(transformers, self.architecture)
        torch.manual_seed(7)
        model = model_class._from_config(
            model_class.config_class(**SMALL | self.config), dtype=torch.float32, attn_implementation="eager"
        )
        model.generation_config.eos_token_id = [2, 3]
        for name, parameter in model.named_parameters():
            # Far from a fresh initialisation, so that every bias, norm and softcap shows in the logits.
            spread = 0.6 if "embed" in name or "lm_head" in name else 0.3
            parameter.data.normal_(0.8 if "norm" in name and "gemma" not in model.config.model_type else 0.0, spread)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(0.0, 0.3)
        return model.eval()


FAMILIES = {
    "llama": Family("LlamaForCausalLM", {"num_attention_heads": 4, "num_key_value_heads": 4}),
    "llama-llama3-rope": Family(
        "LlamaForCausalLM",
        {
            "num_attention_heads": 6,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "tie_word_embeddings": True,
            "attention_bias": True,
            "mlp_bias": True,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 500.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
            },
        },
    ),
    "llama-yarn-rope": Family(
        "LlamaForCausalLM",
        {
            "num_attention_heads": 6,
            "num_key_value_heads": 3,
            "head_dim": 16,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 32,
            },
        },
    ),
    "llama-linear-rope": Family(
        "LlamaForCausalLM",
        {
            "num_attention_heads": 4,
            "num_key_value_heads": 1,
            "rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.5},
        },
    ),
    "llama-dynamic-rope": Family(
        "LlamaForCausalLM",
        {
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0},
        },
    ),
    "mistral": Family("MistralForCausalLM", {"num_attention_heads": 4, "num_key_value_heads": 2, "sliding_window": 11}),
    "qwen2": Family(
        "Qwen2ForCausalLM",
        {
            "num_attention_heads": 6,
            "num_key_value_heads": 2,
            "tie_word_embeddings": True,
            "num_hidden_layers": 5,
            "use_sliding_window": True,
            "sliding_window": 9,
            "max_window_layers": 2,
        },
    ),
    "qwen3": Family(
        "Qwen3ForCausalLM",
        {
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "num_hidden_layers": 5,
            "use_sliding_window": True,
            "sliding_window": 6,
            "layer_types": MIXED,
        },
    ),
    "gemma2": Family(
        "Gemma2ForCausalLM",
        {
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "num_hidden_layers": 5,
            "sliding_window": 10,
            "query_pre_attn_scalar": 24,
            "attn_logit_softcapping": 5.0,
            "final_logit_softcapping": 8.0,
        },
    ),
    "gemma3": Family(
        "Gemma3ForCausalLM",
        {
            "num_attention_heads": 4,
            "num_key_value_heads": 1,
            "head_dim": 16,
            "num_hidden_layers": 6,
            "sliding_window": 7,
            "query_pre_attn_scalar": 20,
            "layer_types": [*MIXED, "full_attention"],
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 5000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            },
        },
    ),
}


@pytest.fixture(scope="session", params=FAMILIES)
def family_folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face folder with a small random model in float32; one per family."""
    folder = tmp_path_factory.mktemp(request.param)
    FAMILIES[request.param].build().save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def family_reference(family_folder: Path) -> transformers.PreTrainedModel:
    """transformers' model of ``family_folder``, eager attention, float32."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        family_folder, dtype=torch.float32, attn_implementation="eager"
    )
    return model.eval()


@pytest.fixture(scope="session")
def family_decoder(family_folder: Path) -> Decoder:
    """Our model of ``family_folder`` in float32."""
    return load_model(family_folder, dtype="float32", device=torch.device("cpu"))


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The packaged GGUF file; skips where it is not installed."""
    try:
        return resolve_model("smollm2")
    except ModelLoadError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def smollm2_reference(smollm2_path: Path) -> transformers.PreTrainedModel:
    """transformers' SmolLM2 in float32, from the same GGUF file by transformers' own reader."""
    values = load_gguf_checkpoint(str(smollm2_path))["config"]
    config = transformers.LlamaConfig(**{key: value for key, value in values.items() if key != "model_type"})
    model = transformers.LlamaForCausalLM(config)
    tensors = load_gguf_checkpoint(str(smollm2_path), return_tensors=True, model_to_load=model)["tensors"]
    missing, unexpected = model.load_state_dict({name: torch.as_tensor(t) for name, t in tensors.items()}, strict=False)
    assert (missing, unexpected) == (["lm_head.weight"], [])  # tied
    return model.eval()


class PagedSequences:
    """Sequences over a paged cache with hand-made, shuffled block tables; blocks behind a window are given up."""

    def __init__(self, decoder: Decoder, num_blocks: int = 400) -> None:
        self.decoder = decoder
        self.layout = KvLayout.of(decoder.spec.layer_windows, BLOCK_SIZE)
        spec = decoder.spec
        self.kv = KvMemory.allocate(
            self.layout, num_blocks, spec.cache_heads, spec.cache_dim, decoder.dtype, decoder.device, decoder.backend
        )
        self.free = (1 + torch.randperm(num_blocks - 1, generator=torch.Generator().manual_seed(3))).tolist()
        self.tokens: list[list[int]] = []
        self.tables: list[list[list[int]]] = []

    def step(self, chunks: dict[int, list[int]]) -> dict[int, torch.Tensor]:
        """Append tokens to sequences by index and compute them in one pass; logits [chunk, vocab] of each."""
        for index, chunk in chunks.items():
            while len(self.tokens) <= index:
                self.tokens.append([])
                self.tables.append([[] for _ in self.layout.groups])
            self.tokens[index] += chunk
        metadata = tuple(self._metadata(group, chunks) for group in range(len(self.layout.groups)))
        positions = [p for i, c in chunks.items() for p in range(len(self.tokens[i]) - len(c), len(self.tokens[i]))]
        ids = [token for chunk in chunks.values() for token in chunk]
        hidden = self.decoder.forward(torch.tensor(ids), torch.tensor(positions), self.kv, metadata)
        logits = self.decoder.logits(hidden)
        return dict(zip(chunks, logits.split([len(chunk) for chunk in chunks.values()]), strict=True))

    def _metadata(self, group: int, chunks: dict[int, list[int]]) -> AttentionMetadata:
        window = self.layout.groups[group].window
        slots: list[int] = []
        tables: list[list[int]] = []
        for index, chunk in chunks.items():
            table, length = self.tables[index][group], len(self.tokens[index])
            while len(table) * BLOCK_SIZE < length:
                table.append(self.free.pop())
            if window is not None:
                for block in range(max(0, length - len(chunk) - window + 1) // BLOCK_SIZE):
                    table[block] = 0
            slots += [table[p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE for p in range(length - len(chunk), length)]
            tables.append(table)
        queries = torch.tensor([len(chunk) for chunk in chunks.values()])
        keys = [len(self.tokens[index]) for index in chunks]
        width = max(len(table) for table in tables)
        return AttentionMetadata(
            cu_seqlens_q=torch.cat((torch.zeros(1, dtype=torch.int64), queries.cumsum(0))).int(),
            seqused_k=torch.tensor(keys, dtype=torch.int32),
            block_table=torch.tensor([t + [0] * (width - len(t)) for t in tables], dtype=torch.int32),
            slot_mapping=torch.tensor(slots),
            max_seqlen_q=int(queries.max()),
            max_seqlen_k=max(keys),
        )


@pytest.fixture
def paged() -> type[PagedSequences]:
    """``paged(decoder).step({sequence: tokens, ...})`` runs a decoder over a hand-made paged cache."""
    return PagedSequences
