"""Model facts out of a checkpoint's own description: Hugging Face's ``config.json`` and GGUF metadata.

Pure: dictionaries in, ``ModelSpec`` out. What a family's configuration leaves unsaid stands in the readers' tables.
"""

from .model_config_gguf import spec_from_gguf
from .model_config_hf import spec_from_hf

__all__ = ["spec_from_gguf", "spec_from_hf"]
