"""Tells checkpoints apart without reading them whole: the same on every machine that has the same files."""

from hashlib import blake2b
from pathlib import Path

from ...cluster.errors import ModelLoadError

SAMPLES = 256
"""Of each file: other weights differ nearly everywhere."""
SAMPLE_BYTES = 4096
_WEIGHTS = (".safetensors", ".gguf")


def fingerprint(path: Path) -> str:
    """12 hexadecimal digits for a model folder or GGUF file, from sizes and samples of the files that hold weights.

    Names and times do not count. Raises ModelLoadError when a file cannot be read.
    """
    digest = blake2b(digest_size=6)
    try:
        for file in sorted(file for file in path.iterdir() if file.suffix in _WEIGHTS) if path.is_dir() else [path]:
            _take(file, digest)
    except OSError as error:
        raise ModelLoadError(f"{path}: cannot be read: {error}") from error
    return digest.hexdigest()


def _take(file: Path, digest: "blake2b") -> None:
    size = file.stat().st_size
    digest.update(size.to_bytes(8, "little"))
    with file.open("rb") as stream:
        for number in range(SAMPLES):
            stream.seek(max(0, size - SAMPLE_BYTES) * number // (SAMPLES - 1))
            digest.update(stream.read(SAMPLE_BYTES))
