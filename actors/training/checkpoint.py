"""What training leaves behind: folders of weights, and the state from which it can go on."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file


def write_folder(folder: Path, config: Mapping[str, Any], files: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
    """Safetensors files by name, floats in float16, then config.json: with it the folder counts as complete."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, tensors in files.items():
        save_file({key: _stored(value) for key, value in tensors.items()}, folder / name, metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps({**config, "torch_dtype": "float16"}, indent=2) + "\n")


def _stored(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.half() if tensor.is_floating_point() else tensor).contiguous()
