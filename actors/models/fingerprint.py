"""Tells checkpoints apart without reading them whole: the same on every machine that has the same files."""

import json
from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path
from typing import BinaryIO

from ...cluster.damaged import reading
from ...cluster.errors import ModelLoadError
from ...router.gguf_metadata import read_gguf_header

SAMPLES = 256
"""Of each file, evenly spaced: most changes of weights are everywhere."""
SAMPLE_BYTES = 4096
TENSOR_BYTES = 512
"""Of the beginning of every tensor: some changes are only in a few."""
_WEIGHTS = (".safetensors", ".gguf")


def fingerprint(path: Path) -> str:
    """12 hexadecimal digits for a model folder or GGUF file, from sizes and samples of the files that hold weights.

    Names and times do not count. Raises ModelLoadError when a file cannot be read.
    """
    digest = blake2b(digest_size=6)
    try:
        for file in sorted(file for file in path.iterdir() if file.suffix in _WEIGHTS) if path.is_dir() else [path]:
            with reading(file), file.open("rb") as stream:
                size = file.stat().st_size
                digest.update(size.to_bytes(8, "little"))
                for place, length in _samples(file, stream, size):
                    stream.seek(place)
                    digest.update(stream.read(length))
    except OSError as error:
        raise ModelLoadError(f"{path}: cannot be read: {error}") from error
    return digest.hexdigest()


def _samples(file: Path, stream: BinaryIO, size: int) -> Iterator[tuple[int, int]]:
    """Where they begin, and their lengths."""
    for number in range(SAMPLES):
        yield max(0, size - SAMPLE_BYTES) * number // (SAMPLES - 1), SAMPLE_BYTES
    if file.suffix == ".gguf":
        offsets = [tensor.offset for tensor in read_gguf_header(file).tensors.values()]
    else:
        stream.seek(0)
        length = int.from_bytes(stream.read(8), "little")
        header = json.loads(stream.read(min(length, size)))
        offsets = [8 + length + tensor["data_offsets"][0] for name, tensor in header.items() if name != "__metadata__"]
    for offset in sorted(offsets):
        yield offset, TENSOR_BYTES
