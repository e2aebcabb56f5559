"""Model facts out of a checkpoint's own description: Hugging Face's ``config.json`` and GGUF metadata.

Pure: dictionaries in, ``ModelSpec`` out. What a family's configuration leaves unsaid stands in the readers' tables.
A description may be wrong in any way: sizes that make no model are refused before anything is made of them.
"""

from collections.abc import Collection, Mapping
from typing import Any

from . import model_config_gguf, model_config_hf
from .damaged import reading
from .model_config_checks import check_spec
from .model_spec import ModelSpec

_NO_VALUES: Mapping[str, Any] = {}


def spec_from_hf(config: Mapping[str, Any], generation: Mapping[str, Any] = _NO_VALUES) -> ModelSpec:
    """Read ``config.json`` (as transformers 4 or 5 writes it) and, for end tokens, ``generation_config.json``.

    Raises ModelLoadError for an architecture, activation, rope scaling or layer type that is not supported, and for a
    size that is missing or cannot be.
    """
    with reading("the model's configuration"):
        return check_spec(model_config_hf.spec_from_hf(config, generation))


def spec_from_gguf(metadata: Mapping[str, Any], tensors: Collection[str] = ()) -> ModelSpec:
    """Read GGUF key-value pairs; the file's tensor names tell of biases and an untied head.

    Mistral comes as ``llama``: GGUF files carry no window for it. Raises ModelLoadError for an architecture or rope
    scaling that is not supported, and for a size that is missing or cannot be.
    """
    with reading("the model's metadata"):
        return check_spec(model_config_gguf.spec_from_gguf(metadata, tensors))
