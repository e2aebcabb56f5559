"""Warmroot: LLM serving on Ray that sends each request to the replica where its prefix is still warm.

    handle = warmroot.run("smollm2", num_replicas=2)      # or, inside a Ray program: warmroot.connect()
    output = handle.generate_sync("The capital of France is", warmroot.SamplingParams(max_tokens=8))

    with warmroot.LLM("smollm2") as llm:                  # one engine in this process, without Ray
        outputs = llm.generate(["The capital of France is"])

Names are loaded when they are first used: importing the package imports neither ray nor torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .cluster.config import WarmrootConfig
    from .cluster.output_grammar import OutputGrammar
    from .cluster.sampling_params import SamplingParams
    from .deploy.handle import Handle, connect
    from .deploy.launch import run, shutdown
    from .deploy.llm import LLM
    from .router.output import OutputDelta, RequestOutput

_HOMES = {
    "LLM": ".deploy.llm",
    "Handle": ".deploy.handle",
    "OutputDelta": ".router.output",
    "OutputGrammar": ".cluster.output_grammar",
    "RequestOutput": ".router.output",
    "SamplingParams": ".cluster.sampling_params",
    "WarmrootConfig": ".cluster.config",
    "connect": ".deploy.handle",
    "run": ".deploy.launch",
    "shutdown": ".deploy.launch",
}

__all__ = [
    "LLM",
    "Handle",
    "OutputDelta",
    "OutputGrammar",
    "RequestOutput",
    "SamplingParams",
    "WarmrootConfig",
    "connect",
    "run",
    "shutdown",
]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name], __name__), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
