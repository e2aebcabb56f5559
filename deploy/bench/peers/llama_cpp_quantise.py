"""llama.cpp's quantiser: a GGUF file in another precision. It is done when its facts come."""

import ctypes
from pathlib import Path
from typing import Any

import llama_cpp  # pyright: ignore[reportMissingImports]

from .protocol import serve


class Quantised:
    """Settings: ``source``, ``target`` and ``file_type``, a ``llama_ftype``."""

    def __init__(self, settings: dict[str, Any]) -> None:
        params = llama_cpp.llama_model_quantize_default_params()
        params.ftype = settings["file_type"]
        params.allow_requantize = True
        unfinished = Path(settings["target"]).with_suffix(".part")
        if llama_cpp.llama_model_quantize(settings["source"].encode(), str(unfinished).encode(), ctypes.byref(params)):
            raise RuntimeError(f"llama.cpp cannot convert {settings['source']}")
        unfinished.rename(settings["target"])
        self.facts: dict[str, Any] = {"version": llama_cpp.__version__}


if __name__ == "__main__":
    serve(Quantised)
