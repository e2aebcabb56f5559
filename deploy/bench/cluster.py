"""A local cluster for the length of a measurement."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ...cluster.config import WarmrootConfig
from ..launch import endpoint, run, shutdown
from ..local_ray import free_port

DTYPES = {"fp16": "float16", "fp32": "float32", "bf16": "bfloat16", "auto": "auto"}

MODEL_NAME = "bench"


@contextmanager
def running_cluster(model: str, dtype: str, **keys: Any) -> Iterator[str]:
    """Start a cluster on a free port, give the URL of its API, and take it down with its Ray."""
    config = WarmrootConfig.of(model, dtype=DTYPES[dtype], port=free_port(), served_model_name=MODEL_NAME, **keys)
    handle = run(config, progress=False)
    try:
        yield endpoint(config)
    finally:
        handle.close()
        shutdown()
