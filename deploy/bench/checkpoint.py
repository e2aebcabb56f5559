"""A GGUF file as a Hugging Face folder, in fp32, for the peers that read nothing else."""

import json
from pathlib import Path

from safetensors.torch import save_file

from ...actors.models.gguf_source import GgufSource
from ...actors.models.spec import read_spec
from ...actors.models.tensors import wanted_tensors
from ...cluster.model_config_export import config_from_spec


def as_folder(model: Path, scratch: Path) -> Path:
    """The model as a folder: itself, or an fp32 copy under ``scratch`` that is made once. Raises ModelLoadError."""
    if model.is_dir():
        return model
    folder = scratch / f"{model.stem}-fp32"
    if not (folder / "config.json").exists():
        _export(model, folder)
    return folder


def _export(model: Path, folder: Path) -> None:
    spec, source = read_spec(model), GgufSource(model)
    config = config_from_spec(spec) | {"torch_dtype": "float32"}
    tensors = {name: source.read(name).float().contiguous() for name in wanted_tensors(spec)}
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    # Last: the folder counts as complete once this file is there.
    (folder / "config.json").write_text(json.dumps(config))
