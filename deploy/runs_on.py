"""Says what computes in the replicas."""

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

WITHOUT_NATIVE = (
    "Without native kernels a CPU decodes two to four times slower: install a C++ compiler (g++ or clang), then install"
    " Warmroot again or run make kernels."
)


def runs_on(replicas: Iterable[Mapping[str, Any]]) -> list[str]:
    """A line for all replicas that are alike, and what is lost where native kernels are missing.

    Replicas as ``/load`` tells of them, or the fields of ``ReplicaInfo``.
    """
    alike = Counter(_line(replica) for replica in replicas)
    lines = [text if len(alike) == 1 else f"{count} x {text}" for text, count in alike.items()]
    return [*lines, WITHOUT_NATIVE] if any(text.startswith("torch") for text in alike) else lines


def _line(replica: Mapping[str, Any]) -> str:
    kernels, threads = replica["kernels"], replica["num_threads"]
    if not kernels.startswith("torch"):
        kernels += " kernels"
    return (
        f"{kernels}, {replica['weights_format']} weights, {replica['kv_format']} KV,"
        f" {threads} thread{'' if threads == 1 else 's'} a replica"
    )
