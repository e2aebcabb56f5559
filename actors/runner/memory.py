"""How much memory KV pages may take, and how many pages that is."""

import os
from pathlib import Path
from typing import NamedTuple

import torch

from ...cluster.errors import ConfigError
from ...cluster.kv_formats import KvFormat
from ...cluster.kv_layout import KvLayout, blocks_in
from ...cluster.model_spec import ModelSpec
from ..attention.kv_memory import KvType

_HOST_SHARE = 0.5
"""Of the free RAM: weights are loaded by then, but the machine has other things to do."""
_CGROUP = Path("/sys/fs/cgroup")


def page_bytes(spec: ModelSpec, layout: KvLayout, dtype: KvType) -> int:
    """Bytes of one page: keys and values of ``block_size`` tokens in ``slots`` layers."""
    if isinstance(dtype, KvFormat):
        return layout.slots * spec.cache_heads * dtype.page_bytes(spec.cache_dim, layout.block_size)
    return layout.slots * layout.block_size * spec.cached_elements * dtype.itemsize


def open_page_bytes(spec: ModelSpec, layout: KvLayout, dtype: KvType) -> int:
    """Bytes of a page that tokens still join, beside the page itself; 0 for floats."""
    heads = spec.cache_heads * layout.slots
    return heads * dtype.open_page_bytes(spec.cache_dim, layout.block_size) if isinstance(dtype, KvFormat) else 0


class PageSizes(NamedTuple):
    """Bytes of what one KV block takes."""

    page: int
    """Of the model, and of what drafts."""
    open_page: int = 0
    """More, while tokens still join the block."""
    open_pages: int = 0
    """Blocks of which that may be so at a time."""


def kv_blocks_for(sizes: PageSizes, memory_bytes: int, layout: KvLayout) -> int:
    """Pages in ``memory_bytes``, the null page included. Raises ConfigError if they hold no sequence of one block."""
    num_blocks, least = blocks_in(memory_bytes, *sizes), 1 + len(layout.groups)
    if num_blocks < least:
        raise ConfigError(
            f"kv_cache_memory: {memory_bytes} bytes hold {num_blocks} KV blocks of {sizes.page} bytes,"
            f" at least {least} are needed",
            param="kv_cache_memory",
        )
    return num_blocks


def useful_blocks(layout: KvLayout, max_model_len: int, max_num_seqs: int) -> int:
    """Pages beyond which nothing is gained but more cache: every sequence at its longest."""
    groups = range(len(layout.groups))
    return 1 + max_num_seqs * sum(layout.blocks_for(group, max_model_len) for group in groups)


def available_bytes(device: torch.device, gpu_memory_utilization: float = 0.9, num_sharers: int = 1) -> int:
    """What KV may take when nothing is said: a share of the free RAM, or what utilisation leaves of the GPU."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return max(0, free - int(total * (1 - gpu_memory_utilization)))
    return int(_free_ram() * _HOST_SHARE / num_sharers)


def _free_ram() -> int:
    """Bytes that can be taken without swapping, within the container's limit."""
    free = _available_by_kernel() or os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit, used = _number(_CGROUP / "memory.max"), _number(_CGROUP / "memory.current")
    return free if limit is None or used is None else min(free, max(0, limit - used))


def _available_by_kernel() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    found = [line.split()[1] for line in lines if line.startswith("MemAvailable:")]
    return int(found[0]) * 1024 if found else None


def _number(path: Path) -> int | None:
    """None where there is no such file, or it says "max"."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None
