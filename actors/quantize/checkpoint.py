"""The folder that is written: safetensors shards, config.json and the tokenizer, whatever the model came as."""

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import save_file

from ...cluster.errors import ConfigError
from ...cluster.model_config_export import config_from_spec
from ...router.tokenizer import Tokenizer
from ..models.spec import is_gguf
from .layerwise import Layerwise, QuantisedLayer
from .layouts import awq_tensors, gptq_tensors
from .settings import QuantizeSettings

_COPIED = ("tokenizer*", "*.model", "*.jinja", "vocab.json", "merges.txt", "added_tokens.json",
           "special_tokens_map.json", "chat_template*", "generation_config.json")  # fmt: skip
SHARD_BYTES = 4 << 30


@dataclass(frozen=True, slots=True)
class WrittenCheckpoint:
    """Sizes of what was written, in bytes."""

    quantised_bytes: int
    """Of the quantised linears, scales and zero points included."""
    quantised_float_bytes: int
    """Of the same linears with 16 bits a weight."""
    total_bytes: int


def quantize(
    path: Path,
    folder: Path,
    settings: QuantizeSettings,
    samples: Sequence[Sequence[int]] = (),
    *,
    shard_bytes: int = SHARD_BYTES,
    on_layer: Callable[[QuantisedLayer], None] | None = None,
) -> WrittenCheckpoint:
    """Quantise a model and write it as a Hugging Face folder; ``samples`` are calibration texts (see ``Layerwise``).

    All that stays in floats is stored as float16. Raises ConfigError, before any work, for settings that do not fit the
    model or a ``folder`` that is not empty; ModelLoadError for a model that cannot be read.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"--output: {folder} exists and is not an empty folder", param="output")
    layerwise = Layerwise(path, settings)
    config = _config(path, layerwise) | {"dtype": "float16", "quantization_config": settings.config()}
    config.pop("torch_dtype", None)
    folder.mkdir(parents=True, exist_ok=True)
    writer = _ShardWriter(folder, shard_bytes)
    quantised, plain = 0, 0
    floats = set(layerwise.tensors) - {f"{module}.weight" for module in layerwise.modules}
    for layer in layerwise.run(samples):
        for module, linear in layer.linears.items():
            tensors = awq_tensors(linear) if settings.method == "awq" else gptq_tensors(linear, settings.bits)
            quantised += sum(tensor.nbytes for tensor in tensors.values())
            plain += 2 * linear.codes.numel()
            for name, tensor in tensors.items():
                writer.add(f"{module}.{name}", tensor)
        for name, tensor in layer.floats.items():
            writer.add(name, tensor.half())
            floats.discard(name)
        if on_layer is not None:
            on_layer(layer)
    for name in sorted(floats):
        writer.add(name, layerwise.read(name).half())
    total = writer.finish()
    write_tokenizer(path, folder)
    # Last: with it the folder is complete.
    _write_json(folder / "config.json", config)
    return WrittenCheckpoint(quantised, plain, total)


def _config(path: Path, layerwise: Layerwise) -> dict[str, Any]:
    if is_gguf(path):
        return config_from_spec(layerwise.spec)
    config = cast("dict[str, Any]", json.loads((path / "config.json").read_text(encoding="utf-8")))
    if "text_config" in config:
        raise ConfigError(f"model: {path} has parts other than text, which cannot be written", param="model")
    return config


def write_tokenizer(path: Path, folder: Path) -> None:
    """Copies of a folder's files; of a GGUF file what was read from it."""
    if not is_gguf(path):
        for file in {file for pattern in _COPIED for file in path.glob(pattern)}:
            shutil.copy(file, folder)
        return
    card = Tokenizer.from_path(path).to_dict()
    (folder / "tokenizer.json").write_text(card["tokenizer"], encoding="utf-8")
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **card["special_tokens"]}
    if card["chat_template"] is not None:
        config["chat_template"] = card["chat_template"]
    _write_json(folder / "tokenizer_config.json", config)


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


class _ShardWriter:
    """Tensors into files of at most ``shard_bytes``, one tensor at least, named as transformers names them."""

    def __init__(self, folder: Path, shard_bytes: int) -> None:
        self._folder = folder
        self._shard_bytes = shard_bytes
        self._pending: dict[str, torch.Tensor] = {}
        self._shards: list[list[str]] = []
        self._total = 0

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Write later."""
        pending = sum(tensor.nbytes for tensor in self._pending.values())
        if self._pending and pending + tensor.nbytes > self._shard_bytes:
            self._flush()
        self._pending[name] = tensor.contiguous()
        self._total += tensor.nbytes

    def finish(self) -> int:
        """Write what is left and the index. The bytes of all tensors."""
        self._flush()
        count = len(self._shards)
        if count == 1:
            self._part(0).rename(self._folder / "model.safetensors")
            return self._total
        names = [f"model-{number:05}-of-{count:05}.safetensors" for number in range(1, count + 1)]
        for number, name in enumerate(names):
            self._part(number).rename(self._folder / name)
        places = {tensor: name for name, tensors in zip(names, self._shards, strict=True) for tensor in tensors}
        index = {"metadata": {"total_size": self._total}, "weight_map": dict(sorted(places.items()))}
        _write_json(self._folder / "model.safetensors.index.json", index)
        return self._total

    def _flush(self) -> None:
        save_file(self._pending, self._part(len(self._shards)), metadata={"format": "pt"})
        self._shards.append(list(self._pending))
        self._pending = {}

    def _part(self, number: int) -> Path:
        return self._folder / f"part-{number}.safetensors"
