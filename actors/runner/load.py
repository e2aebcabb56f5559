"""From files to a runner."""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch

from ...cluster.errors import ConfigError
from ...cluster.kv_formats import KV_FORMATS
from ...cluster.kv_layout import KvLayout
from ...cluster.speculative_config import SpeculativeConfig
from ...router.tokenizer import Tokenizer
from ..attention.kv_memory import KvType
from ..models.decoder import Decoder
from ..models.draft_head import load_draft_model
from ..models.loader import load_model
from ..models.spec import model_len
from ..models.weights import Progress
from .guides import Guides
from .load_drafter import draft_page_bytes, drafter_of
from .memory import PageSizes, available_bytes, kv_blocks_for, open_page_bytes, page_bytes, useful_blocks
from .runner import ModelRunner

_KV_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
_FLOAT8_CAPABILITY = (8, 9)
"""Of GPUs that convert eight-bit floats: Ada, Hopper and later ones."""
_CACHE_FACTOR = 2
"""By default, pages for twice what running sequences can hold: the rest is cache."""


class KvMemoryConfig(NamedTuple):
    """How KV memory is laid out and bounded: by pages, by bytes, or by what the device has."""

    block_size: int = 16
    kv_cache_dtype: str = "auto"
    num_kv_blocks: int | None = None
    kv_cache_memory: int | None = None
    gpu_memory_utilization: float = 0.9
    num_sharers: int = 1
    """Replicas that may share the machine's RAM."""
    step_tokens: int = 2048
    """Most tokens of a step, which may all join blocks of quantised pages."""


def default_device() -> torch.device:
    """A GPU where there is one."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def load_runner(
    path: Path,
    *,
    dtype: str = "auto",
    quantization: str = "auto",
    kv: KvMemoryConfig,
    max_model_len: int | None = None,
    max_num_seqs: int = 256,
    device: torch.device | None = None,
    progress: Progress | None = None,
    speculation: SpeculativeConfig | None = None,
    draft_path: Path | None = None,
    open_tokenizer: Callable[[], Tokenizer] | None = None,
) -> ModelRunner:
    """Load a model and give it KV memory. Raises ModelLoadError and ConfigError.

    ``draft_path`` is the model that drafts, or the folder of Medusa heads, if that is what ``speculation`` asks for.
    Only with ``open_tokenizer``, which is called when the first grammar comes, do outputs keep to grammars.
    """
    device = device or default_device()
    decoder = load_model(path, dtype=dtype, quantization=quantization, device=device, progress=progress)
    layout = KvLayout.of(decoder.spec.layer_windows, kv.block_size)
    draft = None
    if draft_path is not None and speculation is not None and speculation.drafts_with_model:
        draft = load_draft_model(draft_path, dtype=dtype, device=device)
    kv_dtype, num_blocks = kv_memory_for(decoder, layout, kv, max_model_len, max_num_seqs, draft)
    spec = decoder.spec
    guides = None if open_tokenizer is None else Guides(open_tokenizer, spec.vocab_size, spec.eos_token_ids, device)
    if speculation is None:
        return ModelRunner(decoder, layout, num_blocks, kv_dtype=kv_dtype, guides=guides)
    return ModelRunner(
        decoder,
        layout,
        num_blocks,
        kv_dtype=kv_dtype,
        make_drafter=drafter_of(speculation, decoder, layout, num_blocks, kv_dtype, draft, draft_path),
        acceptance_threshold=speculation.acceptance_threshold,
        guides=guides,
    )


def kv_memory_for(
    decoder: Decoder,
    layout: KvLayout,
    kv: KvMemoryConfig,
    max_model_len: int | None,
    max_num_seqs: int,
    draft: Decoder | None = None,
) -> tuple[KvType, int]:
    """Type and number of the KV blocks that a loaded model gets. Raises ConfigError.

    A model that drafts has as many beside them, which come out of the same memory.
    """
    kv_dtype = _kv_dtype(kv.kv_cache_dtype, decoder)
    length = model_len(decoder.spec, max_model_len)
    size = page_bytes(decoder.spec, layout, kv_dtype)
    if draft is not None:
        size += draft_page_bytes(draft.spec, decoder.spec, layout, kv_dtype)
    open_size = open_page_bytes(decoder.spec, layout, kv_dtype)
    sizes = PageSizes(size, open_size, layout.open_pages(max_num_seqs, kv.step_tokens))
    return kv_dtype, kv.num_kv_blocks or _num_blocks(decoder.device, layout, kv, sizes, length, max_num_seqs)


def _kv_dtype(name: str, decoder: Decoder) -> KvType:
    if name == "auto":
        # The native attention reads 16-bit keys as fast as it can get them; torch's converts what it gathers.
        return decoder.table_dtype if decoder.backend.name == "native" else decoder.dtype
    if name not in KV_FORMATS:
        raise ConfigError(
            f"kv_cache_dtype: {name!r} is not one of auto, {', '.join(KV_FORMATS)}", param="kv_cache_dtype"
        )
    if name in _KV_DTYPES:
        return _KV_DTYPES[name]
    if decoder.spec.mla is not None:
        raise ConfigError(
            f"kv_cache_dtype: {name} needs keys and values; this model caches latents, which fp16 keeps small",
            param="kv_cache_dtype",
        )
    if name == "fp8" and decoder.device.type == "cuda":
        _check_capability(torch.cuda.get_device_capability(decoder.device))
    return KV_FORMATS[name]


def _check_capability(capability: tuple[int, int]) -> None:
    if capability < _FLOAT8_CAPABILITY:
        needed, found = (".".join(map(str, pair)) for pair in (_FLOAT8_CAPABILITY, capability))
        raise ConfigError(
            f"kv_cache_dtype: fp8 needs a GPU of compute capability {needed} or more, this one has {found};"
            " int8 is about as small",
            param="kv_cache_dtype",
        )


def _num_blocks(
    device: torch.device, layout: KvLayout, kv: KvMemoryConfig, sizes: PageSizes, length: int, max_num_seqs: int
) -> int:
    if kv.kv_cache_memory is not None:
        return kv_blocks_for(sizes, kv.kv_cache_memory, layout)
    memory = available_bytes(device, kv.gpu_memory_utilization, kv.num_sharers)
    most = _CACHE_FACTOR * useful_blocks(layout, length, max_num_seqs)
    return min(most, kv_blocks_for(sizes, memory, layout))
