"""Packing happens once: packed weights stay in a file that later starts map.

All replicas on a machine map the same file, so its pages are in memory once; ranks that hold parts of a model have a
file each. Files lie in ``~/.cache/warmroot/packed`` (XDG_CACHE_HOME and WARMROOT_CACHE_DIR are heeded); any of them may
be deleted at any time.
"""

import fcntl
import logging
import os
import platform
from collections.abc import Generator
from contextlib import contextmanager, suppress
from hashlib import blake2b
from pathlib import Path

import torch

from ...cluster.model_tensors import EMBEDDING
from ...cluster.parallel_layout import RankLayout
from ..kernels.linear import WeightFormat, pack
from .packed_file import MAGIC, map_packed, write_packed
from .packing import PackedLinears, Packing, pack_linears, pack_table
from .tensors import fused_linears, wanted_parts, wanted_shapes, wanted_tensors
from .weights import Weights, WeightSource

VARIABLE = "WARMROOT_CACHE_DIR"

logger = logging.getLogger(__name__)


def cache_dir() -> Path:
    """Where Warmroot keeps what it can make again."""
    chosen = os.environ.get(VARIABLE)
    if chosen:
        return Path(chosen).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "warmroot"


def load_packed(weights: Weights, own: RankLayout, packing: Packing) -> PackedLinears:
    """The packed linears of a checkpoint: from the cache, or packed now and kept there if that can be done.

    Weights that lie in no files are packed in memory.
    """
    if not weights.source.files:
        return _in_memory(weights, own, packing)
    path = _path(weights.source, own, packing)
    linears = _open(path) or _pack(path, weights, own, packing)
    weights.skip(EMBEDDING)
    for modules in fused_linears(own).values():
        for module in modules:
            weights.skip(module + ".weight")
            weights.skip(module + ".bias")
    return linears


def _pack(path: Path, weights: Weights, own: RankLayout, packing: Packing) -> PackedLinears:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _locked(path):
            return _open(path) or _store(path, weights, own, packing)
    except OSError as error:
        logger.warning("packed weights cannot be kept in %s (%s): every start packs them again", path.parent, error)
        return _in_memory(weights, own, packing)


def _in_memory(weights: Weights, own: RankLayout, packing: Packing) -> PackedLinears:
    return PackedLinears(packing.name, pack_table(weights, own, packing), dict(pack_linears(weights, own, packing)))


def _store(path: Path, weights: Weights, own: RankLayout, packing: Packing) -> PackedLinears:
    """Called with the lock held, so the unfinished file is nobody else's."""
    partial = path.with_suffix(".partial")
    try:
        with partial.open("wb") as file:
            write_packed(file, packing.name, pack_table(weights, own, packing), pack_linears(weights, own, packing))
        partial.replace(path)
    except BaseException:
        with suppress(OSError):
            partial.unlink()
        raise
    _drop_superseded(path)
    return map_packed(path)


def _open(path: Path) -> PackedLinears | None:
    """None if it is not there or is damaged."""
    try:
        return map_packed(path)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        logger.warning("%s cannot be used (%s): packing the weights again", path, error)
        return None


@contextmanager
def _locked(path: Path) -> Generator[None, None, None]:
    """One process packs, the others wait for it and map what it wrote."""
    with path.with_suffix(".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # freed when the file is closed, also by a crash
        yield


def _path(source: WeightSource, own: RankLayout, packing: Packing) -> Path:
    """The name has two parts: which weights in which form, and the state of the files and of the packed layout."""
    files = [file.resolve() for file in source.files]
    stats = [file.stat() for file in files]
    what = _digest(files, packing, own.spec, platform.machine(), *_cut(own))
    state = _digest([(stat.st_size, stat.st_mtime_ns) for stat in stats], _layout_digest())
    return cache_dir() / "packed" / f"{files[0].stem}-{packing.name}-{what}-{state}.bin"


def _drop_superseded(path: Path) -> None:
    """Delete what an earlier state of the same checkpoint or of the kernels left; who has it mapped keeps it."""
    stem, _, _ = path.stem.rpartition("-")
    for other in path.parent.glob(f"{stem}-*"):
        if other.stem != path.stem:
            with suppress(OSError):
                other.unlink()


def _cut(own: RankLayout) -> tuple[object, ...]:
    """What tells ranks' weights apart; nothing for a whole model."""
    names, parts = sorted(wanted_shapes(own)), sorted(wanted_parts(own).items())
    return (names, parts) if parts or names != sorted(wanted_tensors(own.spec)) else ()


def _digest(*facts: object) -> str:
    return blake2b(repr(facts).encode(), digest_size=8).hexdigest()


def _layout_digest() -> str:
    """Of a small weight packed in every format: it changes when the kernels or the file lay it out differently."""
    sample = torch.linspace(-1.0, 1.0, 17 * 96).view(17, 96)
    digest = blake2b(MAGIC, digest_size=8)
    for kind in WeightFormat:
        digest.update(pack(sample, kind).data.numpy().tobytes())
    return digest.hexdigest()
