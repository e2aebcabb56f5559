"""Attention heads over tensor parallel ranks."""

from dataclasses import dataclass

from .errors import ConfigError
from .model_spec import ModelSpec
from .model_tensors import Dim
from .splits import split_evenly


@dataclass(frozen=True, slots=True)
class HeadCut:
    """One rank's heads: each KV head with all of its query heads, or its share of them if ``kv_ranks`` have it."""

    queries: range
    kv: range
    kv_ranks: int = 1
    """Ranks that hold each of these KV heads: sums over a tp group count them so many times."""

    def dims(self, spec: ModelSpec) -> dict[Dim, range]:
        """The rank's part of the dimensions that are made of heads, in elements."""
        parts: dict[Dim, range] = {
            "queries": _scaled(self.queries, spec.head_dim),
            "keys": _scaled(self.kv, spec.head_dim),
            "heads_out": _scaled(self.queries, spec.head_dim if spec.mla is None else spec.mla.v_head_dim),
        }
        if spec.mla is not None:
            parts["kv_expanded"] = _scaled(self.queries, spec.mla.qk_nope_head_dim + spec.mla.v_head_dim)
        if spec.qk_norm_whole:
            parts |= {"query_norm": parts["queries"], "key_norm": parts["keys"]}
        return parts


def cut_heads(spec: ModelSpec, tp: int, group: int = 1) -> list[HeadCut]:
    """The heads of each rank; ranks may differ by one KV head. Raises ConfigError with the sizes that fit.

    ``group``: the output projection reads whole groups of so many columns.
    """
    cuts = _cut(spec, tp, group)
    if cuts is None:
        fits = [size for size in range(1, spec.num_heads + 1) if _cut(spec, size, group) is not None]
        groups = f" in groups of {group} columns" if group > 1 else ""
        raise ConfigError(
            f"tensor_parallel_size: {tp} ranks cannot share the model's {spec.num_heads} attention heads over"
            f" {spec.num_kv_heads} KV heads{groups}; {_listed(fits)}",
            param="tensor_parallel_size",
        )
    return cuts


def _cut(spec: ModelSpec, tp: int, group: int) -> list[HeadCut] | None:
    heads, kv_heads = spec.num_heads, spec.num_kv_heads
    if tp <= kv_heads:
        per_kv = heads // kv_heads
        cuts = [HeadCut(_scaled(kv, per_kv), kv) for kv in split_evenly(kv_heads, tp)]
    elif tp % kv_heads == 0 and heads % tp == 0:
        copies = tp // kv_heads
        queries = split_evenly(heads, tp)
        cuts = [HeadCut(queries[rank], range(rank // copies, rank // copies + 1), copies) for rank in range(tp)]
    else:
        return None
    columns = [cut.dims(spec)["heads_out"].start for cut in cuts]
    return cuts if all(column % group == 0 for column in columns) else None


def _scaled(part: range, size: int) -> range:
    return range(part.start * size, part.stop * size)


def _listed(sizes: list[int]) -> str:
    """Up to a dozen sizes."""
    names = ", ".join(map(str, sizes[:12]))
    return f"{names}, ... fit" if len(sizes) > 12 else f"{names} {'fits' if len(sizes) == 1 else 'fit'}"
