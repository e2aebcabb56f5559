"""Opens what new weights come from: checkpoints by name, or tensors of a Ray actor.

Such an actor has two methods: ``tensors()``, the shape and dtype of each by its Hugging Face name, such as
``{"model.norm.weight": ((576,), "float32")}``; and ``tensor(name)``, one of them whole, as a torch tensor.
"""

import warnings
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch

from ..cluster.damaged import reading
from ..cluster.errors import ModelLoadError
from ..cluster.weights_update import NewWeights
from .models.source import resolve_model
from .models.tensor_source import FLOATS, TensorSource
from .models.tensors import Shape
from .models.weights import WeightSource

NAMESPACE = "warmroot"
"""Where an actor is looked for whose name does not say."""
ANSWER_S = 600.0
"""How long an actor may take for one tensor."""

SharedTensor = tuple[str, Any]
"""A dtype, and a numpy array of the tensor's values, or of their bits where numpy has no such dtype."""


def open_new(new: NewWeights) -> Path | WeightSource:
    """A checkpoint's path, or a source of tensors. Raises ModelLoadError."""
    return resolve_model(new.model, new.revision) if new.model else _tensors_of(new.actor)


def to_shared(tensor: torch.Tensor) -> SharedTensor:
    """As numpy, which the object store maps into every process of a machine without a copy."""
    dtype, tensor = str(tensor.dtype).removeprefix("torch."), tensor.detach().cpu().contiguous()
    return dtype, (tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor).numpy()


def from_shared(shared: SharedTensor) -> torch.Tensor:
    """Inverse of ``to_shared``, over the same memory."""
    dtype, values = shared
    with warnings.catch_warnings():  # torch cannot mark a tensor as read-only; nothing writes to weights
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        tensor = torch.from_numpy(values)
    return tensor.view(FLOATS[dtype]) if dtype == "bfloat16" else tensor


def _tensors_of(name: str) -> TensorSource:
    import ray  # ranks that are plain processes do without

    namespace, _, own = name.rpartition("/")
    try:
        actor = ray.get_actor(own, namespace or NAMESPACE)
    except ValueError as error:
        raise ModelLoadError(f"no Ray actor of the name {own} in the namespace {namespace or NAMESPACE}") from error
    with reading(f"actor {name}"):
        told = cast("Mapping[str, tuple[Shape, str]]", _answer(name, actor.tensors.remote()))
        described = {tensor: (tuple(shape), dtype) for tensor, (shape, dtype) in told.items()}
        return TensorSource(described, partial(_fetch, name, actor), f"actor {name}")


def _fetch(name: str, actor: Any, tensor: str) -> torch.Tensor:
    with reading(f"actor {name}: tensor {tensor}"):
        found = _answer(name, actor.tensor.remote(tensor))
        if isinstance(found, list):  # where it lies in the object store
            found = _answer(name, found[0])
        return found if isinstance(found, torch.Tensor) else from_shared(found)


def _answer(name: str, reference: Any) -> Any:
    import ray
    from ray.exceptions import RayError

    try:
        return ray.get(reference, timeout=ANSWER_S)
    except RayError as error:
        raise ModelLoadError(f"actor {name}: {str(error).splitlines()[-1]}") from error
